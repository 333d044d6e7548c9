"""Settings that are fine alone and wrong together. Each check yields what clashes, why, and what to do about it.

A setting that nothing would read is an error as well: a run must not look configured when it is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath

from headwater.config.algorithm_checks import ALGORITHM_CHECKS
from headwater.config.clash import Check, Clash, Layers, given_in, unread
from headwater.config.keys import settings, value_at
from headwater.config.normalization_checks import NORMALIZATION_CHECKS
from headwater.config.schema import Config
from headwater.config.tree import show

FILE_SUFFIXES = (".parquet", ".json", ".jsonl")


def find_clashes(config: Config, layers: Layers) -> list[Clash]:
    """Every clash in ``config``; ``layers`` tells what was given from what is a default."""
    return [clash for check in CHECKS for clash in check(config, layers)]


def minibatches_divide_prompts(config: Config, layers: Layers) -> Iterator[Clash]:
    prompts, parts = config.trainer.num_prompts_per_step, config.learner.num_minibatches
    if prompts % parts:
        fitting = max(divisor for divisor in range(1, min(parts, prompts) + 1) if prompts % divisor == 0)
        yield Clash(
            ("learner.num_minibatches", "trainer.num_prompts_per_step"),
            f"must divide trainer.num_prompts_per_step = {prompts}; use {fitting}, "
            f"or trainer.num_prompts_per_step={prompts // parts * parts or parts}",
        )


def sequence_fits_microbatch(config: Config, layers: Layers) -> Iterator[Clash]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.learner.max_tokens_per_microbatch < longest:
        yield Clash(
            ("learner.max_tokens_per_microbatch", "data.max_prompt_tokens", "rollout.max_new_tokens"),
            f"a whole sequence must fit: data.max_prompt_tokens + rollout.max_new_tokens = {longest}; "
            f"use at least {longest}, or shorten one of the two",
        )


def periods_end_within_run(config: Config, layers: Layers) -> Iterator[Clash]:
    total = config.trainer.total_steps
    never = {
        "eval.every_steps": "would never evaluate between the first step and the last",
        "trainer.checkpoint_every_steps": "would never save before the end",
    }
    for key, consequence in never.items():
        if value_at(config, key) > total and not _was_cut_short(key, layers):
            yield Clash(
                (key, "trainer.total_steps"),
                f"is more than trainer.total_steps = {total}, so it {consequence}; "
                f"use at most {total}, or 0 to turn it off",
            )


def warmup_ends_within_run(config: Config, layers: Layers) -> Iterator[Clash]:
    key, learner = "learner.num_warmup_steps", config.learner
    waiting = config.critic.num_warmup_steps if config.critic.enabled else 0
    steps = (config.trainer.total_steps - waiting) * learner.num_minibatches * learner.num_epochs
    # A critic that takes all steps is another clash.
    if steps > 0 and learner.num_warmup_steps >= steps and not _was_cut_short(key, layers):
        yield Clash(
            (key, "trainer.total_steps"),
            f"the learning rate would never reach its peak in the {steps} optimiser steps of trainer.total_steps = "
            f"{config.trainer.total_steps}; use less than {steps}",
        )


def _was_cut_short(key: str, layers: Layers) -> bool:
    """A run cut short on the command line may keep what its recipe says about longer ones."""
    is_resolved = len(layers) == len(settings(Config))  # the recipe of a run, which must load again
    return is_resolved or layers.get("trainer.total_steps", -1) > layers.get(key, -1) >= 0


def task_fills_a_step(config: Config, layers: Layers) -> Iterator[Clash]:
    if any(is_file(source) for source in config.data.train) or config.data.dataset:
        return
    prompts = config.trainer.num_prompts_per_step
    needed = math.ceil(prompts / len(config.data.train))
    if config.data.num_train_rows < needed:
        yield Clash(
            ("data.num_train_rows", "trainer.num_prompts_per_step"),
            f"is too few for one step of trainer.num_prompts_per_step = {prompts}; use at least {needed}",
        )


def float16_needs_loss_scaling(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.model.dtype == "float16":
        yield Clash(
            ("model.dtype",), "small gradients vanish in float16 and there is no loss scaling; use bfloat16 or float32"
        )


def greedy_samples_differ(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.eval.temperature == 0 and config.eval.num_samples_per_prompt > 1:
        yield Clash(
            ("eval.num_samples_per_prompt", "eval.temperature"),
            "eval.temperature = 0 is greedy, so all samples would be the same; use 1, or a temperature above 0",
        )


def files_have_no_task_settings(config: Config, layers: Layers) -> Iterator[Clash]:
    # Compared with the default, not with what was given: a resolved recipe gives every key, and must load again.
    evaluated = config.data.eval or config.data.train
    readers = {
        "data.task_args": (*config.data.train, *config.data.eval),
        "data.num_train_rows": config.data.train,
        "data.num_eval_rows": evaluated,
    }
    if config.data.dataset:
        return
    for key, sources in readers.items():
        default = settings(Config)[key].default()
        if value_at(config, key) != default and all(is_file(source) for source in sources):
            named = "data.eval" if key == "data.num_eval_rows" and config.data.eval else "data.train"
            yield Clash(
                (key, named),
                f"only a task reads this, and {named} = {show(list(value_at(config, named)))} is used whole; "
                f"remove it, or set it back to {show(default)}",
            )


def files_evaluate_on_something(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.eval.every_steps and not config.data.eval and all(is_file(source) for source in config.data.train):
        yield Clash(
            ("eval.every_steps", "data.eval", "data.train"),
            "there is nothing to evaluate on: data.eval is empty and the files of data.train have no held-out split; "
            "name files or a task in data.eval, or use 0",
        )


def warm_start_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.warm_start.num_steps == 0:
        why = "warm_start.num_steps = 0 means no warm start; set it too"
        yield from unread(given_in("warm_start", layers), ("warm_start.num_steps",), why, layers)


def eval_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if not (config.eval.before or config.eval.after or config.eval.every_steps):
        switches = ("eval.before", "eval.after", "eval.every_steps")
        why = f"{', '.join(switches)} are all off; turn one on"
        yield from unread(given_in("eval", layers), switches, why, layers)


def engine_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    # Compared with the default, not with what was given: a resolved recipe gives every key, and must load again.
    if config.rollout.backend != "hf":
        return
    for key, setting in settings(Config).items():
        is_read = key == "engine.max_sequences" or not key.startswith("engine.")
        if not is_read and value_at(config, key) != setting.default():
            yield Clash(
                (key, "rollout.backend"),
                f"the hf backend does not read this; use rollout.backend=embedded, or set it back to "
                f"{show(setting.default())}",
            )


def own_process_runs_the_embedded_engine(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.rollout.placement == "disaggregated" and config.rollout.backend != "embedded":
        yield Clash(
            ("rollout.placement", "rollout.backend"),
            f"a process of its own runs the embedded engine, not rollout.backend = {show(config.rollout.backend)}; "
            "use rollout.backend=embedded, or rollout.placement=colocated",
        )


def weight_transfer_is_read(config: Config, layers: Layers) -> Iterator[Clash]:
    # Compared with the default: a resolved recipe gives every key, and must load again.
    default = settings(Config)["rollout.weight_transfer"].default()
    if config.rollout.placement == "colocated" and config.rollout.weight_transfer != default:
        yield Clash(
            ("rollout.weight_transfer", "rollout.placement"),
            "nothing reads this, because rollout.placement = colocated hands weights over within the process; use "
            f"rollout.placement=disaggregated, or set it back to {show(default)}",
        )


def learner_leaves_only_an_engine_that_waits(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.learner.offload_during_rollout:
        return
    remedy = "set it to false"
    if config.rollout.max_staleness > 0:
        yield Clash(
            ("learner.offload_during_rollout", "rollout.max_staleness"),
            "learner and engine take turns on the device, and with rollout.max_staleness = "
            f"{config.rollout.max_staleness} both work at the same time; {remedy}, or use rollout.max_staleness=0",
        )
    if config.rollout.placement == "disaggregated":
        yield Clash(
            ("learner.offload_during_rollout", "rollout.placement"),
            f"the engine has its own memory with rollout.placement = disaggregated; {remedy}, or use "
            "rollout.placement=colocated",
        )


def schedule_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.learner.schedule == "constant":
        why = "learner.schedule = constant never falls; use linear or cosine"
        yield from unread(["learner.lowest_learning_rate_fraction"], ("learner.schedule",), why, layers)


def is_file(source: str) -> bool:
    """Whether a data source names a file and not a task."""
    return PurePath(source).suffix in FILE_SUFFIXES


def lengths_are_measured(config: Config, layers: Layers) -> Iterator[Clash]:
    cut = config.data.truncation in ("left", "right", "middle")
    if cut and config.data.num_filter_workers:
        yield Clash(
            ("data.num_filter_workers", "data.truncation"),
            f"nothing is measured ahead with data.truncation = {config.data.truncation}; set it back to 0",
        )


def partial_groups_are_kept(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.rollout.allow_partial_groups and config.rollout.on_failure == "stop":
        yield Clash(
            ("rollout.allow_partial_groups", "rollout.on_failure"),
            "rollout.on_failure = stop ends the run at the first failure; use rollout.on_failure=drop with it",
        )


CHECKS: tuple[Check, ...] = (
    minibatches_divide_prompts,
    sequence_fits_microbatch,
    periods_end_within_run,
    warmup_ends_within_run,
    task_fills_a_step,
    float16_needs_loss_scaling,
    greedy_samples_differ,
    lengths_are_measured,
    files_have_no_task_settings,
    files_evaluate_on_something,
    warm_start_settings_are_read,
    eval_settings_are_read,
    engine_settings_are_read,
    schedule_settings_are_read,
    own_process_runs_the_embedded_engine,
    weight_transfer_is_read,
    learner_leaves_only_an_engine_that_waits,
    partial_groups_are_kept,
    *ALGORITHM_CHECKS,
    *NORMALIZATION_CHECKS,
)
