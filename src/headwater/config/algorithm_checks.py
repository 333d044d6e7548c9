"""Settings of algorithms, rewards, the critic and adapters that are fine alone and wrong together.

Only built-in names are judged: what an extension of one's own needs is its author's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headwater.config.clash import Check, Clash, Layers, given_in, unread
from headwater.config.keys import settings, value_at
from headwater.config.schema import Config
from headwater.core.registry import is_path

# Alone in its group a response has no baseline, or is its own.
GROUP_ADVANTAGES = frozenset(
    {"grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline", "optimal_token_baseline"}
)
VALUE_ADVANTAGES = frozenset({"gae", "gae_turn"})

# These push on a sample whose advantage is zero, or choose their tokens by looking at all samples.
LOSSES_OF_ALL_SAMPLES = frozenset({"dro", "kl_cov", "clip_cov"})

LOSSES_WITH_AN_AGGREGATION = frozenset({"geo_mean", "sapo"})
OWN_AGGREGATION = "seq-mean-token-mean"

# What reads the scorer's values themselves, and not the sum to which others may be added.
READS_THE_SCORES_ALONE = {
    "gdpo": "compares the parts of the scorer's reward, and {key} is in none of them",
    "gpg": "counts the scores that are not 0, and with {key} none is",
}

RECOMPUTED = ("recompute", "metrics")

WEIGHTING_CORRECTIONS = frozenset({"truncate", "icepop"})


def group_has_baseline(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage, samples = config.algorithm.advantage, config.rollout.num_samples_per_prompt
    if advantage in GROUP_ADVANTAGES and samples < 2:
        yield Clash(
            ("rollout.num_samples_per_prompt", "algorithm.advantage"),
            f"algorithm.advantage = {advantage} compares the responses to one prompt, and a group of one has no "
            "baseline; use at least 2",
        )


def critic_serves_the_advantage(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage = config.algorithm.advantage
    if advantage in VALUE_ADVANTAGES and not config.critic.enabled:
        yield Clash(
            ("algorithm.advantage", "critic.enabled"),
            "needs the values of a critic; set critic.enabled=true, or use an advantage without one, such as grpo",
        )
    if config.critic.enabled and advantage not in VALUE_ADVANTAGES and not is_path(advantage):
        yield Clash(
            ("critic.enabled", "algorithm.advantage"),
            f"algorithm.advantage = {advantage} reads no values, so the critic would learn for nothing; "
            "set it to false, or use algorithm.advantage=gae",
        )


def critic_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.critic.enabled:
        why = "critic.enabled = false means no critic; turn it on"
        yield from unread(given_in("critic", layers), ("critic.enabled",), why, layers)


def critic_warmup_ends(config: Config, layers: Layers) -> Iterator[Clash]:
    steps, total = config.critic.num_warmup_steps, config.trainer.total_steps
    if config.critic.enabled and steps >= total:
        yield Clash(
            ("critic.num_warmup_steps", "trainer.total_steps"),
            f"the policy would never learn in trainer.total_steps = {total}; use less than {total}",
        )


def lora_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.lora.rank == 0:
        why = "lora.rank = 0 trains all weights; set it too"
        yield from unread(given_in("lora", layers), ("lora.rank",), why, layers)


def adapters_start_at_the_reference(config: Config, layers: Layers) -> Iterator[Clash]:
    """The reference of adapters is the model without them, and a supervised start would train them before it counts."""
    measured = config.algorithm.kl_in_reward > 0 or config.algorithm.kl_in_loss > 0
    if config.lora.rank and config.warm_start.num_steps and measured:
        yield Clash(
            ("lora.rank", "warm_start.num_steps", "algorithm.kl_in_reward", "algorithm.kl_in_loss"),
            "the reference is then the model without adapters, which is not where the supervised start ends; "
            "use warm_start.num_steps=0, or no divergence from a reference",
        )


def every_gradient_is_computed(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.learner.skip_zero_advantages:
        return
    algorithm = config.algorithm
    reasons = [
        f"{key} has a gradient there"
        for key in ("algorithm.entropy_bonus", "algorithm.kl_in_loss")
        if value_at(config, key) > 0
    ]
    if algorithm.policy_loss in LOSSES_OF_ALL_SAMPLES:
        reasons.append(f"algorithm.policy_loss = {algorithm.policy_loss} depends on them")
    if reasons:
        yield Clash(
            ("learner.skip_zero_advantages", *(reason.split(" ")[0] for reason in reasons)),
            f"leaves out samples whose advantage is zero, and {' and '.join(reasons)}; use false",
        )


def kl_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm = config.algorithm
    if algorithm.kl_in_reward == 0:
        why = "algorithm.kl_in_reward = 0 is no penalty to steer; set it to where the coefficient starts"
        yield from unread(["algorithm.kl_target"], ("algorithm.kl_in_reward",), why, layers)
    if algorithm.kl_target == 0:
        why = "algorithm.kl_target = 0 steers nothing; set it too"
        yield from unread(["algorithm.kl_horizon"], ("algorithm.kl_target",), why, layers)
    if algorithm.kl_in_reward == 0 and algorithm.kl_in_loss == 0:
        switches = ("algorithm.kl_in_reward", "algorithm.kl_in_loss")
        why = f"{' and '.join(switches)} are both 0; set one"
        yield from unread(["algorithm.kl_estimator"], switches, why, layers)


def kl_steering_is_slow(config: Config, layers: Layers) -> Iterator[Clash]:
    """Over less than a step the coefficient would jump by more than 20 %, down to nothing within one."""
    samples = config.trainer.num_prompts_per_step * config.rollout.num_samples_per_prompt
    if config.algorithm.kl_target > 0 and config.algorithm.kl_horizon < samples:
        yield Clash(
            ("algorithm.kl_horizon", "trainer.num_prompts_per_step", "rollout.num_samples_per_prompt"),
            f"a step has {samples} samples (trainer.num_prompts_per_step · rollout.num_samples_per_prompt), so the "
            f"coefficient would move by more than 20 % in each; use at least {samples}",
        )


def kl_gradient_is_used(config: Config, layers: Layers) -> Iterator[Clash]:
    estimator, algorithm = config.algorithm.kl_estimator, config.algorithm
    if estimator.endswith("+") and algorithm.kl_in_reward > 0 and algorithm.kl_in_loss == 0:
        yield Clash(
            ("algorithm.kl_estimator", "algorithm.kl_in_loss"),
            f"the + changes only a gradient, and a penalty in the reward has none; use {estimator[:-1]}, "
            "or algorithm.kl_in_loss",
        )


def corrections_have_something_to_correct(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm = config.algorithm
    if not algorithm.corrections:
        return
    if algorithm.policy_loss == "decoupled":
        yield Clash(
            ("algorithm.corrections", "algorithm.policy_loss"),
            "algorithm.policy_loss = decoupled already weighs by the same ratio; use [], or policy_loss=ppo",
        )
    elif algorithm.old_logprobs not in RECOMPUTED:
        yield Clash(
            ("algorithm.corrections", "algorithm.old_logprobs"),
            f"algorithm.old_logprobs = {algorithm.old_logprobs} takes the engine's log-probs for the learner's, so "
            "every ratio is 1; use algorithm.old_logprobs=recompute, or []",
        )


def corrections_weigh_once(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm = config.algorithm
    names = algorithm.corrections
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        yield Clash(("algorithm.corrections",), f"names {repeated} twice; once is enough")
        return
    rejection = algorithm.corrections_args.get("reject", {})
    weighted = isinstance(rejection, Mapping) and rejection.get("weighted") is True
    weighting = [name for name in names if name in WEIGHTING_CORRECTIONS or (name == "reject" and weighted)]
    if len(weighting) > 1:
        yield Clash(
            ("algorithm.corrections", "algorithm.corrections_args"),
            f"{' and '.join(weighting)} each weigh by the ratio, so that it would be squared; use one of them, and "
            "reject or m2po to leave tokens out",
        )


def decoupled_has_two_policies(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.algorithm.policy_loss == "decoupled" and config.algorithm.old_logprobs == "rollout":
        yield Clash(
            ("algorithm.policy_loss", "algorithm.old_logprobs"),
            "algorithm.old_logprobs = rollout makes the proximal policy the one that sampled, so every weight is 1; "
            "use algorithm.old_logprobs=recompute or loglinear, or policy_loss=ppo",
        )


def recomputed_where_needed(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage, old = config.algorithm.advantage, config.algorithm.old_logprobs
    if advantage == "optimal_token_baseline" and old not in RECOMPUTED:
        yield Clash(
            ("algorithm.advantage", "algorithm.old_logprobs"),
            "needs the sums of squared probabilities that a forward pass gives; use algorithm.old_logprobs=recompute",
        )


def truncated_sampling_needs_recomputed_logprobs(config: Config, layers: Layers) -> Iterator[Clash]:
    """The engine's log-probs are of the cut distribution, the learner's of the full one: their ratio would be wrong."""
    if config.algorithm.old_logprobs in RECOMPUTED:
        return
    for key, keeps_all in (("rollout.top_k", 0), ("rollout.top_p", 1.0)):
        if value_at(config, key) != keeps_all:
            yield Clash(
                (key, "algorithm.old_logprobs"),
                "samples from a cut distribution, whose log-probs the learner's full one cannot be compared with; "
                f"use {keeps_all}, or algorithm.old_logprobs=recompute",
            )


def aggregation_is_used(config: Config, layers: Layers) -> Iterator[Clash]:
    # Compared with the default, not with what was given: a resolved recipe gives every key, and must load again.
    algorithm, default = config.algorithm, settings(Config)["algorithm.aggregation"].default()
    fixed = algorithm.policy_loss in LOSSES_WITH_AN_AGGREGATION and "aggregation" not in algorithm.policy_loss_args
    if fixed and not config.critic.enabled and algorithm.aggregation not in (OWN_AGGREGATION, default):
        yield Clash(
            ("algorithm.aggregation", "algorithm.policy_loss"),
            f"algorithm.policy_loss = {algorithm.policy_loss} always takes {OWN_AGGREGATION}; use that",
        )


def filtering_can_accept(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.algorithm.filter_groups:
        why = "algorithm.filter_groups = false draws no new prompts; turn it on"
        yield from unread(["algorithm.max_filter_rounds"], ("algorithm.filter_groups",), why, layers)
        return
    if config.rollout.num_samples_per_prompt < 2:
        yield Clash(
            ("algorithm.filter_groups", "rollout.num_samples_per_prompt"),
            "one sample always scores the same as itself, so every group would be dropped; "
            "use rollout.num_samples_per_prompt=2 or more, or false",
        )
    if config.reward.model:
        yield Clash(
            ("algorithm.filter_groups", "reward.model"),
            "groups are compared before reward.model scores them, so it would drop some that differ; use false",
        )


def greedy_baseline_is_whole(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.algorithm.advantage != "remax":
        return
    lacking = {
        "reward.model": "does not score the greedy response",
        "reward.overlong_tokens": "does not count the tokens of the greedy response",
    }
    for key, why in lacking.items():
        if value_at(config, key):
            yield Clash(
                ("algorithm.advantage", key),
                f"{key} {why}, so its baseline would lack that part; use another advantage, such as rloo",
            )


def scores_are_read_alone(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage = config.algorithm.advantage
    why = READS_THE_SCORES_ALONE.get(advantage)
    if why is None:
        return
    for key in ("algorithm.kl_in_reward", "reward.model", "reward.overlong_tokens"):
        if value_at(config, key):
            instead = ", or algorithm.kl_in_loss" if key == "algorithm.kl_in_reward" else ""
            yield Clash(
                ("algorithm.advantage", key),
                f"{why.format(key=key)}; use another advantage, such as grpo{instead}",
            )
    if advantage == "gdpo" and config.algorithm.filter_groups:
        yield Clash(
            ("algorithm.filter_groups", "algorithm.advantage"),
            "compares whole scores, so it would drop groups of which algorithm.advantage = gdpo can learn, because "
            "their parts differ; use false",
        )


def reward_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.reward.model:
        why = "reward.model is empty; name one"
        yield from unread(["reward.model_weight"], ("reward.model",), why, layers)
    if config.reward.overlong_tokens == 0:
        why = "reward.overlong_tokens = 0 means no penalty; set it too"
        yield from unread(["reward.overlong_penalty"], ("reward.overlong_tokens",), why, layers)


def overlong_tokens_fit(config: Config, layers: Layers) -> Iterator[Clash]:
    limit = config.rollout.max_new_tokens
    if config.reward.overlong_tokens > limit:
        yield Clash(
            ("reward.overlong_tokens", "rollout.max_new_tokens"),
            f"the penalty grows over the last tokens of rollout.max_new_tokens = {limit}; use at most {limit}",
        )


ALGORITHM_CHECKS: tuple[Check, ...] = (
    group_has_baseline,
    critic_serves_the_advantage,
    critic_settings_are_read,
    critic_warmup_ends,
    lora_settings_are_read,
    adapters_start_at_the_reference,
    every_gradient_is_computed,
    kl_settings_are_read,
    kl_steering_is_slow,
    kl_gradient_is_used,
    corrections_have_something_to_correct,
    corrections_weigh_once,
    decoupled_has_two_policies,
    recomputed_where_needed,
    truncated_sampling_needs_recomputed_logprobs,
    aggregation_is_used,
    filtering_can_accept,
    greedy_baseline_is_whole,
    scores_are_read_alone,
    reward_settings_are_read,
    overlong_tokens_fit,
)
