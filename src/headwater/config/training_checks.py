"""Clashes between settings of the trainer, evaluation, the critic, the reference and late scores.

Also of ``data.sources``, and of objects that only the Python program has which started a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from headwater.config.clash import Check, Clash, Layers, is_contradicted, is_resolved, unread
from headwater.config.declared import read_declared
from headwater.config.keys import settings, value_at
from headwater.config.paths import is_folder, is_hub_id
from headwater.config.schema import Config
from headwater.config.traits import AdvantageTraits
from headwater.config.tree import show
from headwater.core.registry import NOT_HERE, PYTHON, PythonObject, nearest

SOURCE_KEYS = ("source", "subset", "split", "columns", "system_prompt", "data_source", "max_rows", "weight")
_TEXTS = ("source", "subset", "split", "system_prompt", "data_source")


def critic_minibatches_divide_prompts(config: Config, layers: Layers) -> Iterator[Clash]:
    prompts, parts = config.trainer.num_prompts_per_step, config.critic.num_minibatches
    if parts is not None and prompts % parts:
        yield Clash(
            ("critic.num_minibatches", "trainer.num_prompts_per_step"),
            f"must divide trainer.num_prompts_per_step = {prompts}; use null for learner.num_minibatches = "
            f"{config.learner.num_minibatches}",
        )


def epochs_or_steps(config: Config, layers: Layers) -> Iterator[Clash]:
    given_later = layers.get("trainer.total_steps", -1) >= layers.get("trainer.total_epochs", -1)
    if config.trainer.total_epochs and given_later and not is_resolved(layers):
        yield Clash(
            ("trainer.total_steps", "trainer.total_epochs"),
            f"trainer.total_epochs = {config.trainer.total_epochs} decides the number of steps; remove this, or set "
            "trainer.total_epochs=0 too",
        )


def periods_in_epochs_end_within_run(config: Config, layers: Layers) -> Iterator[Clash]:
    total = config.trainer.total_epochs
    never = {
        "eval.every_epochs": "would never evaluate between the first step and the last",
        "trainer.checkpoint_every_epochs": "would never save before the end",
    }
    for key, consequence in never.items():
        if 0 < total < value_at(config, key):
            yield Clash(
                (key, "trainer.total_epochs"),
                f"is more than trainer.total_epochs = {total}, so it {consequence}; use at most {total}, or 0 to turn "
                "it off",
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
    if not (config.eval.after or config.eval.is_repeated):
        yield Clash(
            ("trainer.best_metric", "eval.every_steps"),
            "no evaluation during training would measure it; set eval.every_steps or eval.every_epochs",
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


def layers_can_be_fused(config: Config, layers: Layers) -> Iterator[Clash]:
    learner, lora = config.learner, config.lora
    in_the_way = {
        "run.deterministic": (config.run.deterministic, "computes projections separately in every run"),
        "learner.fused_layers": (not learner.fused_layers, "uses no fused kernels, of which this is one"),
        "learner.compile": (learner.compile, "compiles the layers instead"),
        "learner.convert_at_once": (not learner.convert_at_once, "converts one layer at a time"),
        "lora.rank": (lora.rank > 0 and not lora.targets, "gives every projection an adapter"),
    }
    asked = {"learner.join_projections": tuple(in_the_way), "learner.fused_layers": ("learner.compile",)}
    for key, others in asked.items():
        for other in others if value_at(config, key) else ():
            is_in_the_way, why = in_the_way[other]
            if is_in_the_way and is_contradicted(key, other, layers):
                cause = f"{other} = {show(value_at(config, other))} {why}"
                yield Clash((key, other), f"nothing reads this, because {cause}; remove one of the two")


def engine_can_be_deterministic(config: Config, layers: Layers) -> Iterator[Clash]:
    key, other = "engine.deterministic", "run.deterministic"
    if config.run.deterministic and not config.engine.deterministic and is_contradicted(key, other, layers):
        yield Clash(
            (key, other),
            "nothing reads this, because run.deterministic = true needs a deterministic engine; set that to false, or "
            "remove this",
        )


TRAINING_CHECKS: tuple[Check, ...] = (
    critic_minibatches_divide_prompts,
    epochs_or_steps,
    periods_in_epochs_end_within_run,
    greedy_evaluation_keeps_all_tokens,
    best_is_measured,
    reference_is_read,
    scores_can_be_late,
    layers_can_be_fused,
)

GIVEN_CHECKS: tuple[Check, ...] = (engine_can_be_deterministic,)
"""Of what was given, before some settings turn on others."""


def sources_are_complete(config: Config, layers: Layers) -> Iterator[Clash]:
    data = config.data
    for name, part in data.sources.items():
        key = f"data.sources.{name}"
        if name not in (*data.train, *data.eval):
            yield Clash((key,), "neither data.train nor data.eval has this name; add it to one, or remove this", part)
        for field, value in part.items():
            if field not in SOURCE_KEYS:
                yield Clash((f"{key}.{field}",), f"no such key; {nearest(field, list(SOURCE_KEYS))}", value)
            elif reason := _wrong(field, value):
                yield Clash((f"{key}.{field}",), reason, value)
        source = part.get("source", name)
        if isinstance(source, str):
            yield from _unread(config, name, source, part)


def _wrong(field: str, value: Any) -> str:
    if field in _TEXTS:
        return "" if isinstance(value, str) and value else "must be text, and not empty"
    if field == "columns":
        is_right = isinstance(value, Mapping) and all(isinstance(each, str) and each for each in value.values())
        return "" if is_right else "must be a mapping of names to columns, for example {prompt: question}"
    if field == "max_rows":
        return "" if type(value) is int and value >= 1 else "must be a whole number >= 1; remove it to use all rows"
    is_weight = type(value) in (int, float) and math.isfinite(value) and value > 0
    return "" if is_weight else "must be a number > 0; remove the source from data.train to leave it out"


def _unread(config: Config, name: str, source: str, part: Mapping[str, Any]) -> Iterator[Clash]:
    key = f"data.sources.{name}"
    for field in ("subset", "split"):
        if field in part and not (is_hub_id(source) or is_folder(source)):
            yield Clash(
                (f"{key}.{field}",), f"only a dataset of the hub or a folder has one, not {source}", part[field]
            )
    if "weight" in part and name not in config.data.train:
        yield Clash((f"{key}.weight",), "only data.train is mixed by weight; remove it", part["weight"])
    if config.data.dataset:
        yield Clash((key, "data.dataset"), "only RLHFDataset reads this; remove it, or data.dataset", dict(part))


def objects_are_here(config: Config, layers: Layers) -> Iterator[Clash]:
    for key in settings(Config):
        value = value_at(config, key)
        values = value if isinstance(value, tuple) else (value,)
        if key == "reward.functions":
            values = tuple(part.get("function") for part in value.values())
        for each in values:
            if isinstance(each, str) and each.startswith(PYTHON) and not isinstance(each, PythonObject):
                yield Clash((key,), NOT_HERE)


DATA_CHECKS: tuple[Check, ...] = (sources_are_complete, objects_are_here)
