"""Settings that are valid alone but not together. Each check yields what clashes, why, and what to do about it.

A setting that nothing would read is an error as well: a run must not look configured when it is not.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headwater.config.clash import Check, Clash, Layers, given_in, is_resolved, unread
from headwater.config.declared import WrongDeclaration, read_declared
from headwater.config.keys import settings, value_at
from headwater.config.paths import is_file, is_whole, with_absolute_paths
from headwater.config.schema import Config
from headwater.config.traits import WorkflowTraits
from headwater.config.tree import show
from headwater.core.registry import is_path
from headwater.core.requests import wrong_stop


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
    for key in ("learner.max_tokens_per_microbatch", "learner.max_tokens_per_forward_pass"):
        budget = value_at(config, key)
        # 0 is the default of max_tokens_per_forward_pass, which is larger than max_tokens_per_microbatch.
        if 0 < budget < longest:
            yield Clash(
                (key, "data.max_prompt_tokens", "rollout.max_new_tokens"),
                f"a whole sequence must fit: data.max_prompt_tokens + rollout.max_new_tokens = {longest}; "
                f"use at least {longest}, or shorten one of the two",
            )


def periods_end_within_run(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.trainer.total_epochs:
        return  # the number of steps is known when the data are loaded
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
    if config.trainer.total_epochs:
        return
    waiting = config.critic.num_warmup_steps if config.critic.enabled else 0
    steps = (config.trainer.total_steps - waiting) * learner.num_minibatches * learner.num_epochs
    # A critic whose warm-up takes all steps is reported by critic_warmup_ends.
    if steps > 0 and learner.num_warmup_steps >= steps and not _was_cut_short(key, layers):
        yield Clash(
            (key, "trainer.total_steps"),
            f"the learning rate would never reach its peak in the {steps} optimiser steps of trainer.total_steps = "
            f"{config.trainer.total_steps}; use less than {steps}",
        )


def _was_cut_short(key: str, layers: Layers) -> bool:
    """Whether the run was shortened on the command line, which does not require changing its recipe."""
    return is_resolved(layers) or layers.get("trainer.total_steps", -1) > layers.get(key, -1) >= 0


def task_fills_a_step(config: Config, layers: Layers) -> Iterator[Clash]:
    if any(is_whole(source) for source in named_sources(config, config.data.train)) or config.data.dataset:
        return
    prompts = config.trainer.num_prompts_per_step
    needed = math.ceil(prompts / len(config.data.train))
    if config.data.num_train_rows < needed:
        yield Clash(
            ("data.num_train_rows", "trainer.num_prompts_per_step"),
            f"is too few for one step of trainer.num_prompts_per_step = {prompts}; use at least {needed}",
        )


def named_sources(config: Config, names: Iterable[str]) -> list[str]:
    """The sources that ``names`` stand for, with ``data.sources`` looked up."""
    return [config.data.sources.get(name, {}).get("source", name) for name in names]


def float16_needs_a_gpu(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.model.dtype == "float16" and config.model.device == "cpu":
        yield Clash(
            ("model.dtype", "model.device"),
            "a CPU computes float16 hundreds of times slower than float32; use float32, or model.device=cuda",
        )
    if config.model.dtype != "float16":
        why = f"model.dtype = {config.model.dtype} needs no loss scale; set model.dtype=float16 too"
        keys = ("learner.loss_scale", "learner.loss_scale_growth_steps")
        yield from unread(keys, ("model.dtype",), why, layers)
    elif math.frexp(config.learner.loss_scale)[0] != 0.5:
        yield Clash(
            ("learner.loss_scale",), "must be a power of two, so that scaling rounds nothing; use 65536, for example"
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
        if value_at(config, key) != default and all(map(is_whole, named_sources(config, sources))):
            named = "data.eval" if key == "data.num_eval_rows" and config.data.eval else "data.train"
            yield Clash(
                (key, named),
                f"only a task reads this, and {named} = {show(list(value_at(config, named)))} is used in full; "
                f"remove it, or set it back to {show(default)}",
            )


def files_evaluate_on_something(config: Config, layers: Layers) -> Iterator[Clash]:
    asking = [
        key
        for key in ("eval.every_steps", "eval.every_epochs", "eval.only", "trainer.best_metric")
        if value_at(config, key)
    ]
    whole = map(is_whole, named_sources(config, config.data.train))
    if asking and not config.data.eval and all(whole) and not config.data.dataset:
        yield Clash(
            (asking[0], "data.eval", "data.train"),
            "there is nothing to evaluate on: data.eval is empty and the files of data.train have no held-out split; "
            "name files or a task in data.eval, or turn this off",
        )


def warm_start_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.warm_start.num_steps == 0:
        why = "warm_start.num_steps = 0 means no warm start; set it too"
        yield from unread(given_in("warm_start", layers), ("warm_start.num_steps",), why, layers)


def eval_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if not (config.eval.before or config.eval.after or config.eval.is_repeated or config.eval.only):
        switches = ("eval.before", "eval.after", "eval.every_steps", "eval.every_epochs", "eval.only")
        why = f"{', '.join(switches)} are all off; turn one on"
        data = ["data.eval", "data.num_eval_rows", "data.max_eval_rows"]
        keys = [*given_in("eval", layers), *data, "trainer.num_tracked_samples"]
        yield from unread(keys, switches, why, layers)
        if config.trainer.save_learner_logprobs and not config.trainer.save_rollouts_every_steps:
            saves = ("trainer.save_rollouts_every_steps", *switches)
            why = "trainer.save_rollouts_every_steps = 0 saves no rollouts and all evaluations are off; turn one on"
            yield from unread(["trainer.save_learner_logprobs"], saves, why, layers)
    if config.eval.only:
        why = "eval.only = true evaluates once, in a new run, and trains nothing; set it to false"
        keys = [f"eval.{name}" for name in ("before", "after", "every_steps", "every_epochs")]
        yield from unread([*keys, "run.if_exists"], ("eval.only",), why, layers)


def tracker_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    trainer = config.trainer
    if not trainer.trackers:
        why = "trainer.trackers is empty; name a tracker"
        keys = ["trainer.tracker_args", "trainer.num_tracked_samples", "run.project"]
        yield from unread(keys, ("trainer.trackers",), why, layers)
    repeated = {name for name in trainer.trackers if trainer.trackers.count(name) > 1}
    for name in sorted(repeated):
        yield Clash(("trainer.trackers",), f"names {name} twice; remove one")
    for name, value in trainer.tracker_args.items():
        if trainer.trackers and name not in trainer.trackers:
            reason = f"trainer.trackers does not name {name}; add it there, or remove this"
            yield Clash((f"trainer.tracker_args.{name}", "trainer.trackers"), reason, value)


def profiled_steps_exist(config: Config, layers: Layers) -> Iterator[Clash]:
    profile, total = config.trainer.profile, config.trainer.total_steps
    if not profile.steps:
        why = "trainer.profile.steps is empty; name some steps"
        yield from unread(given_in("trainer.profile", layers), ("trainer.profile.steps",), why, layers)
    late = [step for step in profile.steps if step > total]
    # With trainer.total_epochs, the data decide the number of steps.
    if late and not config.trainer.total_epochs and not _was_cut_short("trainer.profile.steps", layers):
        reason = f"the run has no step {late[0]}: trainer.total_steps = {total}; name steps from 1 to {total}"
        yield Clash(("trainer.profile.steps", "trainer.total_steps"), reason)
    if profile.steps and not profile.ranks:
        yield Clash(("trainer.profile.ranks",), "names no rank, so nothing would be recorded; use [0]")


def schedule_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    learner, critic = config.learner, config.critic
    of_critic = critic.schedule or learner.schedule if critic.enabled else "constant"
    is_shared = of_critic != "constant" and critic.lowest_learning_rate_fraction is None
    if learner.schedule == "constant" and not is_shared:
        why = "learner.schedule = constant never falls; use linear or cosine"
        yield from unread(["learner.lowest_learning_rate_fraction"], ("learner.schedule",), why, layers)
    if of_critic == "constant" and critic.enabled:
        why = "the critic's learning rate is constant and never falls; set critic.schedule to linear or cosine"
        switches = ("critic.schedule", "learner.schedule")
        yield from unread(["critic.lowest_learning_rate_fraction"], switches, why, layers)


def warmup_is_given_once(config: Config, layers: Layers) -> Iterator[Clash]:
    learner = config.learner
    if learner.num_warmup_steps and learner.warmup_fraction:
        yield Clash(
            ("learner.warmup_fraction", "learner.num_warmup_steps"),
            f"learner.num_warmup_steps = {learner.num_warmup_steps} also sets the length of the warm-up; set one of "
            "them to 0",
        )


def lengths_are_measured(config: Config, layers: Layers) -> Iterator[Clash]:
    cut = config.data.truncation in ("left", "right", "middle")
    if cut and config.data.num_filter_workers:
        yield Clash(
            ("data.num_filter_workers", "data.truncation"),
            f"prompt lengths are not measured in advance with data.truncation = {config.data.truncation}; "
            "set it back to 0",
        )


def image_limits_leave_room(config: Config, layers: Layers) -> Iterator[Clash]:
    limit = config.data.max_image_pixels
    if config.data.min_image_pixels > limit:
        yield Clash(
            ("data.min_image_pixels", "data.max_image_pixels"),
            f"images have at most data.max_image_pixels = {limit} pixels; use at most {limit}",
        )


def shortest_reply_fits(config: Config, layers: Layers) -> Iterator[Clash]:
    limit = config.rollout.max_new_tokens
    if config.rollout.min_new_tokens > limit:
        yield Clash(
            ("rollout.min_new_tokens", "rollout.max_new_tokens"),
            f"a reply has at most rollout.max_new_tokens = {limit} tokens; use at most {limit}",
        )


def stop_texts_can_be_found(config: Config, layers: Layers) -> Iterator[Clash]:
    if (fault := wrong_stop(config.rollout.stop)) is not None:
        yield Clash(("rollout.stop",), f"rollout.stop{fault}")


def should_accept_is_a_path(config: Config, layers: Layers) -> Iterator[Clash]:
    name = config.rollout.should_accept
    if name and not is_path(name):
        yield Clash(("rollout.should_accept",), "write it as 'path/to/file.py:function' or 'package.module:function'")


def partial_groups_are_kept(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.rollout.allow_partial_groups and config.rollout.on_failure == "stop":
        yield Clash(
            ("rollout.allow_partial_groups", "rollout.on_failure"),
            "rollout.on_failure = stop ends the run at the first failure; use rollout.on_failure=drop with it",
        )


def tools_are_called(config: Config, layers: Layers) -> Iterator[Clash]:
    workflow = config.rollout.workflow
    named = [key for key in ("tools.use", "tools.config") if value_at(config, key)]
    try:
        declared = read_declared(WorkflowTraits, workflow)
    except WrongDeclaration as error:
        yield Clash(("rollout.workflow",), str(error))
        return
    uses_tools = declared is not None and declared.traits.uses_tools
    if not named:
        why = "tools.use and tools.config name no tools; name some"
        yield from unread(given_in("tools", layers), ("tools.use", "tools.config"), why, layers)
        if uses_tools:
            yield Clash(("rollout.workflow", "tools.use"), "needs tools; name some in tools.use or tools.config")
    elif not uses_tools and not is_path(workflow):
        yield Clash(
            (named[0], "rollout.workflow"),
            f"rollout.workflow = {workflow} calls no tools; use rollout.workflow=tool_agent, or remove this",
        )


CHECKS: tuple[Check, ...] = (
    minibatches_divide_prompts,
    sequence_fits_microbatch,
    periods_end_within_run,
    warmup_ends_within_run,
    task_fills_a_step,
    float16_needs_a_gpu,
    greedy_samples_differ,
    lengths_are_measured,
    image_limits_leave_room,
    files_have_no_task_settings,
    files_evaluate_on_something,
    warm_start_settings_are_read,
    eval_settings_are_read,
    schedule_settings_are_read,
    warmup_is_given_once,
    tracker_settings_are_read,
    profiled_steps_exist,
    partial_groups_are_kept,
    shortest_reply_fits,
    stop_texts_can_be_found,
    should_accept_is_a_path,
    tools_are_called,
)


def files_exist(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.data.dataset:
        return  # only that class knows what the names mean
    for key in ("data.train", "data.eval"):
        for name in named_sources(config, value_at(config, key)):
            if is_file(name) and "://" not in name and not _find(name):
                if Path(name).expanduser().is_absolute():
                    remedy = f"; check the path. If the file was moved, give the new one: {key}=FILE"
                else:
                    remedy = f" (looked in {Path.cwd()}, where relative paths start); check the path, or name a task"
                yield Clash((key,), f"no such file: {name}{remedy}")


def fits_checkpoint(before: Config, checkpoint: Path) -> Check:
    """Settings that a resumed run cannot change, because ``checkpoint`` depends on their values in ``before``."""
    start = [key for key in settings(Config) if key.startswith("warm_start.")]
    before = with_absolute_paths(before)

    def check(config: Config, layers: Layers) -> Iterator[Clash]:
        # The command line may name a file of the run by a relative path.
        config = with_absolute_paths(config)
        for key in (*_DECIDED, *start):
            was, now = value_at(before, key), value_at(config, key)
            if was != now and not _is_gone(was):
                why = _DECIDED.get(key, "its warm start is already complete")
                yield Clash(
                    (key,),
                    f"{checkpoint} was made with {show(was)}, and {why}; remove this setting, or start a new run from "
                    f"its model: headwater train RECIPE model.path={checkpoint / 'model'}",
                )

    return check


_DATA = "its position in the data and its unfinished rollouts belong to those rows"
_DECIDED = {
    "run.seed": "its position in the order of the data depends on it",
    "model.path": "its weights belong to that model",
    "lora.rank": "its adapters have that rank",
    "lora.alpha": "its adapters were trained at that scale",
    "lora.targets": "its adapters belong to those layers",
    "learner.freeze": "it has the weights and averages of the parts that were trained",
    "critic.enabled": "its critic is stored or missing accordingly",
    "critic.path": "the weights of its critic belong to that model",
    "data.train": _DATA,
    "data.sources": _DATA,
    "data.task_args": _DATA,
    "data.dataset": _DATA,
    "data.num_train_rows": _DATA,
    "data.shuffle": "its position in the order of the data depends on it",
}


def _find(name: str) -> list[str]:
    path = Path(name).expanduser()
    return [str(path)] if path.exists() else glob.glob(str(path), recursive=True)


def _is_gone(value: Any) -> bool:
    """Whether a path no longer exists. A file that was moved has a new name in the resumed run."""
    names = value if isinstance(value, tuple) else (value,)
    return any(_is_path(name) and not _find(name) for name in names)


def _is_path(name: Any) -> bool:
    return isinstance(name, str) and (is_file(name) or name.startswith((".", "/", "~")) or name.count("/") > 1)
