"""Clashes between settings of the trainer, evaluation, the critic, the reference and late scores."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.config.checks import Check, Clash, Layers, unread
from headwater.config.declared import read_declared
from headwater.config.keys import settings, value_at
from headwater.config.schema import Config
from headwater.config.traits import AdvantageTraits


def critic_minibatches_divide_prompts(config: Config, layers: Layers) -> Iterator[Clash]:
    prompts, parts = config.trainer.num_prompts_per_step, config.critic.num_minibatches
    if parts is not None and prompts % parts:
        yield Clash(
            ("critic.num_minibatches", "trainer.num_prompts_per_step"),
            f"must divide trainer.num_prompts_per_step = {prompts}; use null for learner.num_minibatches = "
            f"{config.learner.num_minibatches}",
        )


def epochs_or_steps(config: Config, layers: Layers) -> Iterator[Clash]:
    is_resolved = len(layers) == len(settings(Config))  # the recipe of a run has both, and must load again
    given_later = layers.get("trainer.total_steps", -1) >= layers.get("trainer.total_epochs", -1)
    if config.trainer.total_epochs and given_later and not is_resolved:
        yield Clash(
            ("trainer.total_steps", "trainer.total_epochs"),
            f"trainer.total_epochs = {config.trainer.total_epochs} decides the number of steps; remove this, or set "
            "trainer.total_epochs=0 too",
        )


def greedy_evaluation_keeps_all_tokens(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.eval.temperature == 0:
        for key in ("eval.top_k", "eval.top_p", "eval.min_p"):
            if value_at(config, key) != settings(Config)[key].default():
                yield Clash(
                    (key, "eval.temperature"),
                    "eval.temperature = 0 is greedy and samples nothing; set a temperature above 0, or remove this",
                )


def best_is_measured(config: Config, layers: Layers) -> Iterator[Clash]:
    metric = config.trainer.best_metric
    if not metric:
        why = "trainer.best_metric is empty; set it, for example to eval/reward/mean"
        yield from unread(["trainer.best_mode"], ("trainer.best_metric",), why, layers)
        return
    if not metric.startswith("eval/"):
        yield Clash(
            ("trainer.best_metric",),
            f"only metrics of evaluation can choose a checkpoint; write eval/ and its name, for example eval/{metric}",
        )
    if not (config.eval.after or config.eval.every_steps):
        yield Clash(
            ("trainer.best_metric", "eval.every_steps"),
            "no evaluation during training would measure it; set eval.every_steps",
        )


def reference_is_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.reference.path and not (config.algorithm.kl_in_loss or config.algorithm.kl_in_reward):
        yield Clash(
            ("reference.path", "algorithm.kl_in_loss", "algorithm.kl_in_reward"),
            "nothing reads the reference, because algorithm.kl_in_loss and algorithm.kl_in_reward are 0; set one of "
            "them, or remove this",
        )


def scores_can_be_late(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.reward.join != "late":
        return
    advantage = read_declared(AdvantageTraits, config.algorithm.advantage)
    reasons = {
        "rollout.workflow": (config.rollout.workflow != "rlvr", "another workflow than rlvr may look at its scores"),
        "rollout.max_staleness": (
            config.rollout.max_staleness > 0,
            "with rollouts that run ahead, responses are scored during training anyway",
        ),
        "rollout.on_failure": (config.rollout.on_failure == "drop", "a group is complete before its scores are known"),
        "rollout.max_retries": (
            config.rollout.max_retries > 0,
            "a group is complete before its scores are known, so a failed score would not repeat it; for failed "
            "scores, set reward.max_retries instead",
        ),
        "algorithm.filter_groups": (config.algorithm.filter_groups, "groups are filtered by their scores"),
        "rollout.should_accept": (bool(config.rollout.should_accept), "it may look at the scores of a group"),
        "algorithm.advantage": (
            advantage is not None and advantage.traits.needs_greedy_baseline,
            "its baseline is the score of a response",
        ),
    }
    for key, (is_wrong, why) in reasons.items():
        if is_wrong:
            yield Clash(("reward.join", key), f"does not go with {key} = {value_at(config, key)}: {why}; use early")
    algorithm = config.algorithm
    computes = algorithm.old_logprobs != "rollout" or algorithm.kl_in_loss or algorithm.kl_in_reward
    if not (computes or config.critic.enabled or config.reward.model):
        yield Clash(
            ("reward.join", "algorithm.old_logprobs"),
            "nothing is computed before the scores are needed, so late scores would save no time; use early",
        )


TRAINING_CHECKS: tuple[Check, ...] = (
    critic_minibatches_divide_prompts,
    epochs_or_steps,
    greedy_evaluation_keeps_all_tokens,
    best_is_measured,
    reference_is_read,
    scores_can_be_late,
)
