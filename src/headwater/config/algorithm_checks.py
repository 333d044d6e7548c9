"""Settings of algorithms, the critic and adapters that are valid alone but not together.

What a check must know about an algorithm is in its traits (``traits.py``), for built-in names and extensions alike. An
extension whose source cannot be found is not judged here; the run fails when it resolves the name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwater.config.arguments import ChosenCorrection, chosen_corrections
from headwater.config.clash import Check, Clash, Layers, given_in, is_contradicted, unread
from headwater.config.declared import Declared, T, WrongDeclaration, read_declared
from headwater.config.keys import settings, value_at
from headwater.config.schema import Config
from headwater.config.traits import AdvantageTraits, CorrectionTraits, LossTraits
from headwater.core.registry import is_path

RECOMPUTED = ("recompute", "metrics")


def _read(traits: type[T], name: str) -> Declared[T] | None:
    try:
        return read_declared(traits, name)
    except WrongDeclaration:
        return None  # declarations_are_readable reports it


def advantage_of(config: Config) -> Declared[AdvantageTraits] | None:
    """What the advantage declares; None if its source cannot be found."""
    return _read(AdvantageTraits, config.algorithm.advantage)


def _loss(config: Config) -> Declared[LossTraits] | None:
    return _read(LossTraits, config.algorithm.policy_loss)


def _chosen(config: Config) -> Iterator[tuple[type[Any], str, str, Any]]:
    """The traits, name, key of the arguments and arguments of every algorithm that the config names."""
    algorithm = config.algorithm
    yield AdvantageTraits, algorithm.advantage, "algorithm.advantage_args", algorithm.advantage_args
    yield LossTraits, algorithm.policy_loss, "algorithm.policy_loss_args", algorithm.policy_loss_args
    for each in chosen_corrections(algorithm):
        yield CorrectionTraits, each.name, each.key, each.arguments


def declarations_are_readable(config: Config, layers: Layers) -> Iterator[Clash]:
    for traits, name, _, _ in _chosen(config):
        try:
            read_declared(traits, name)
        except WrongDeclaration as error:
            yield Clash((traits.key,), str(error))


def arguments_fit(config: Config, layers: Layers) -> Iterator[Clash]:
    for traits, name, key, arguments in _chosen(config):
        declared, setting = _read(traits, name), ".".join(key.split(".")[:2])
        if not isinstance(arguments, Mapping):
            yield Clash((key, setting), "must be a mapping; write it as {argument: value}", arguments)
        elif declared is not None:
            for argument, reason in declared.problems(arguments):
                value = declared.value(argument, arguments)
                yield Clash((f"{key}.{argument}", traits.key, setting), reason, value)


def arguments_have_a_correction(config: Config, layers: Layers) -> Iterator[Clash]:
    for name, arguments in config.algorithm.corrections_args.items():
        if name not in config.algorithm.corrections:
            reason = "algorithm.corrections does not name it; add it there, or remove this"
            keys = (f"algorithm.corrections_args.{name}", "algorithm.corrections", "algorithm.corrections_args")
            yield Clash(keys, reason, arguments)


def group_has_baseline(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage = advantage_of(config)
    if advantage is not None and advantage.traits.compares_groups and config.rollout.num_samples_per_prompt < 2:
        yield Clash(
            ("rollout.num_samples_per_prompt", "algorithm.advantage"),
            f"algorithm.advantage = {advantage.name} compares the responses to one prompt, and a group of one has no "
            "baseline; use at least 2",
        )


def critic_serves_the_advantage(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage = advantage_of(config)
    if advantage is None:
        return
    if advantage.traits.needs_values and not config.critic.enabled:
        yield Clash(
            ("algorithm.advantage", "critic.enabled"),
            "needs the values of a critic; set critic.enabled=true, or use an advantage without one, such as grpo",
        )
    if config.critic.enabled and not advantage.traits.needs_values:
        declare = ", or declare needs_values=True in its AdvantageTraits" if is_path(advantage.name) else ""
        yield Clash(
            ("critic.enabled", "algorithm.advantage"),
            f"algorithm.advantage = {advantage.name} reads no values, so training the critic would have no effect; "
            f"set it to false, or use algorithm.advantage=gae{declare}",
        )
    elif config.critic.enabled and config.critic.bootstrap_unfinished and not advantage.traits.bootstraps:
        yield Clash(
            ("critic.bootstrap_unfinished", "algorithm.advantage"),
            f"algorithm.advantage = {advantage.name} does not read the values after unfinished responses; use false, "
            "or algorithm.advantage=gae",
        )


def critic_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.critic.enabled:
        why = "critic.enabled = false means no critic; turn it on"
        yield from unread(given_in("critic", layers), ("critic.enabled",), why, layers)


def critic_warmup_ends(config: Config, layers: Layers) -> Iterator[Clash]:
    steps, total = config.critic.num_warmup_steps, config.trainer.total_steps
    if config.critic.enabled and steps >= total and not config.trainer.total_epochs:
        yield Clash(
            ("critic.num_warmup_steps", "trainer.total_steps"),
            f"the policy would never learn in trainer.total_steps = {total}; use less than {total}",
        )


def lora_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.lora.rank == 0:
        why = "lora.rank = 0 trains all weights; set it too"
        yield from unread(given_in("lora", layers), ("lora.rank",), why, layers)


def adapters_start_at_the_reference(config: Config, layers: Layers) -> Iterator[Clash]:
    """With adapters the reference is the base model, but a warm start trains the adapters before the first step."""
    measured = config.algorithm.kl_in_reward > 0 or config.algorithm.kl_in_loss > 0
    if config.lora.rank and config.warm_start.num_steps and measured:
        yield Clash(
            ("lora.rank", "warm_start.num_steps", "algorithm.kl_in_reward", "algorithm.kl_in_loss"),
            "the reference is the model without adapters, which is not the policy that the warm start ends with; "
            "use warm_start.num_steps=0, or set algorithm.kl_in_reward and algorithm.kl_in_loss to 0",
        )


def every_gradient_is_computed(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.learner.skip_zero_advantages:
        return
    reasons = [
        f"{key} has a gradient there"
        for key in ("algorithm.entropy_bonus", "algorithm.kl_in_loss")
        if value_at(config, key) > 0
    ]
    loss = _loss(config)
    if loss is not None and loss.traits.needs_all_samples:
        reasons.append(f"algorithm.policy_loss = {loss.name} depends on them")
    if reasons:
        yield Clash(
            ("learner.skip_zero_advantages", *(reason.split(" ")[0] for reason in reasons)),
            f"leaves out samples whose advantage is zero, and {' and '.join(reasons)}; use false",
        )


def kl_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm = config.algorithm
    if algorithm.kl_in_reward == 0:
        why = (
            "algorithm.kl_in_reward = 0 turns the penalty off that it would adjust; set kl_in_reward to the first "
            "coefficient, for example 0.05"
        )
        yield from unread(["algorithm.kl_target"], ("algorithm.kl_in_reward",), why, layers)
    if algorithm.kl_target == 0:
        why = "algorithm.kl_target = 0 steers nothing; set it too"
        yield from unread(["algorithm.kl_horizon"], ("algorithm.kl_target",), why, layers)
    if algorithm.kl_in_reward == 0 and algorithm.kl_in_loss == 0:
        switches = ("algorithm.kl_in_reward", "algorithm.kl_in_loss")
        why = f"{' and '.join(switches)} are both 0; set one"
        yield from unread(["algorithm.kl_estimator", "algorithm.kl_clamp"], switches, why, layers)


def kl_steering_is_slow(config: Config, layers: Layers) -> Iterator[Clash]:
    """With a shorter horizon the coefficient could change by more than 20 % in one step, even to 0."""
    samples = config.trainer.num_prompts_per_step * config.rollout.num_samples_per_prompt
    if config.algorithm.kl_target > 0 and config.algorithm.kl_horizon < samples:
        yield Clash(
            ("algorithm.kl_horizon", "trainer.num_prompts_per_step", "rollout.num_samples_per_prompt"),
            f"a step has {samples} samples (trainer.num_prompts_per_step · rollout.num_samples_per_prompt), so the "
            f"coefficient could change by more than 20 % in each; use at least {samples}",
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
    algorithm, loss = config.algorithm, _loss(config)
    if not algorithm.corrections:
        return
    if loss is not None and loss.traits.two_policies:
        yield Clash(
            ("algorithm.corrections", "algorithm.policy_loss"),
            f"algorithm.policy_loss = {loss.name} already weighs by the same ratio; use [], or policy_loss=ppo",
        )
    elif algorithm.old_logprobs == "loglinear":
        yield Clash(
            ("algorithm.corrections", "algorithm.old_logprobs"),
            "algorithm.old_logprobs = loglinear approximates the policy that corrections compare with the engine's; "
            "use algorithm.old_logprobs=recompute, rollout, or []",
        )


def repeated_corrections_differ(config: Config, layers: Layers) -> Iterator[Clash]:
    names, arguments = config.algorithm.corrections, config.algorithm.corrections_args
    for name in dict.fromkeys(names):
        given, count = arguments.get(name, {}), names.count(name)
        key = f"algorithm.corrections_args.{name}"
        if isinstance(given, (list, tuple)):
            if len(given) != count:
                times = "once" if count == 1 else f"{count} times"
                yield Clash(
                    (key, "algorithm.corrections", "algorithm.corrections_args"),
                    f"has {len(given)} entries, and algorithm.corrections names {name} {times}; give one for each",
                    given,
                )
            elif any(each in given[:at] for at, each in enumerate(given)):
                yield Clash((key, "algorithm.corrections_args"), "has two equal entries; once is enough", given)
        elif count > 1:
            yield Clash(
                ("algorithm.corrections", key),
                f"names {name} {count} times; give {key} as a list with the arguments of each",
            )


def _weighs(chosen: ChosenCorrection) -> bool:
    declared = _read(CorrectionTraits, chosen.name)
    if declared is None or not isinstance(chosen.arguments, Mapping):
        return False
    return declared.is_on(declared.traits.weighs_by_ratio, chosen.arguments)


def corrections_weigh_once(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm, loss = config.algorithm, _loss(config)
    weighting = [each.label for each in chosen_corrections(algorithm) if _weighs(each)]
    if weighting and algorithm.old_logprobs == "rollout" and loss is not None and not loss.traits.has_no_ratio:
        yield Clash(
            ("algorithm.corrections", "algorithm.old_logprobs", "algorithm.policy_loss"),
            f"algorithm.old_logprobs = rollout computes corrections of the trained policy in every update, and "
            f"algorithm.policy_loss = {loss.name} already contains its ratio, so {weighting[0]} would count it twice; "
            "use algorithm.old_logprobs=recompute, or policy_loss=reinforce, or only reject or m2po",
        )
    if len(weighting) > 1:
        yield Clash(
            ("algorithm.corrections", "algorithm.corrections_args"),
            f"{' and '.join(weighting)} each weigh by the ratio, which would square it; use one of them, and "
            "reject or m2po to remove tokens",
        )


def two_policies_differ(config: Config, layers: Layers) -> Iterator[Clash]:
    loss = _loss(config)
    if loss is not None and loss.traits.two_policies and config.algorithm.old_logprobs == "rollout":
        yield Clash(
            ("algorithm.policy_loss", "algorithm.old_logprobs"),
            "algorithm.old_logprobs = rollout makes the policy that sampled also the proximal one, so every weight "
            "is 1; use algorithm.old_logprobs=recompute or loglinear, or policy_loss=ppo",
        )


def recomputed_where_needed(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage = advantage_of(config)
    needed = advantage is not None and advantage.traits.needs_recomputed_logprobs
    if needed and config.algorithm.old_logprobs not in RECOMPUTED:
        yield Clash(
            ("algorithm.advantage", "algorithm.old_logprobs"),
            "needs statistics that only a forward pass gives; use algorithm.old_logprobs=recompute",
        )


def truncated_sampling_needs_recomputed_logprobs(config: Config, layers: Layers) -> Iterator[Clash]:
    """The engine's log-probs are of the truncated distribution and the learner's of the full one."""
    if config.algorithm.old_logprobs in RECOMPUTED:
        return
    for key in ("rollout.top_k", "rollout.top_p", "rollout.min_p", "rollout.min_new_tokens"):
        keeps_all = settings(Config)[key].default()
        if value_at(config, key) != keeps_all:
            yield Clash(
                (key, "algorithm.old_logprobs"),
                "samples from a truncated distribution, whose log-probs cannot be compared with the learner's; "
                f"use {keeps_all}, or algorithm.old_logprobs=recompute",
            )


def aggregation_is_used(config: Config, layers: Layers) -> Iterator[Clash]:
    # Compared with the default, not with what was given: a resolved recipe gives every key, and must load again.
    algorithm, default = config.algorithm, settings(Config)["algorithm.aggregation"].default()
    loss = _loss(config)
    own = loss.traits.own_aggregation if loss is not None else ""
    fixed = own and "aggregation" not in algorithm.policy_loss_args
    if fixed and not config.critic.enabled and algorithm.aggregation not in (own, default):
        yield Clash(
            ("algorithm.aggregation", "algorithm.policy_loss"),
            f"algorithm.policy_loss = {algorithm.policy_loss} always uses {own}; use that",
        )
    argument = algorithm.policy_loss_args.get("aggregation")
    is_given = is_contradicted("algorithm.aggregation", "algorithm.policy_loss_args", layers)
    if is_given and own and argument and not config.critic.enabled and algorithm.aggregation not in (argument, default):
        yield Clash(
            ("algorithm.aggregation", "algorithm.policy_loss_args"),
            f"nothing reads this, because algorithm.policy_loss_args.aggregation = {argument} replaces it; remove "
            "one of the two",
        )


def filtering_can_accept(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.algorithm.filter_groups:
        if not config.rollout.should_accept:
            why = "algorithm.filter_groups = false draws no new prompts; turn it on, set rollout.should_accept"
            yield from unread(["algorithm.max_filter_rounds"], ("algorithm.filter_groups",), why, layers)
        return
    if config.rollout.num_samples_per_prompt < 2:
        yield Clash(
            ("algorithm.filter_groups", "rollout.num_samples_per_prompt"),
            "a single sample has nothing to differ from, so every group would be dropped; "
            "use rollout.num_samples_per_prompt=2 or more, or false",
        )
    if config.reward.model:
        yield Clash(
            ("algorithm.filter_groups", "reward.model"),
            "groups are compared before reward.model scores them, so groups that differ would be dropped; use false",
        )
    advantage = advantage_of(config)
    if advantage is not None and advantage.traits.reads_reward_parts:
        yield Clash(
            ("algorithm.filter_groups", "algorithm.advantage"),
            f"compares whole scores, but algorithm.advantage = {advantage.name} can learn from groups whose scores "
            "agree if their parts differ; use false",
        )


ALGORITHM_CHECKS: tuple[Check, ...] = (
    declarations_are_readable,
    arguments_fit,
    arguments_have_a_correction,
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
    repeated_corrections_differ,
    corrections_weigh_once,
    two_policies_differ,
    recomputed_where_needed,
    truncated_sampling_needs_recomputed_logprobs,
    aggregation_is_used,
    filtering_can_accept,
)
