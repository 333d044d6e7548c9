"""What rows and chat-template arguments ask for that nothing in the run reads. See ``config/notices.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from headwater.config.keys import settings, value_at
from headwater.config.notices import Notice
from headwater.config.schema import Config
from headwater.config.tree import show
from headwater.core.records import Prompt
from headwater.core.registry import is_path
from headwater.data.load import PromptDataset, readable_prompts

_NUM_ROWS = 16
_OF_MEDIA = ("min_image_pixels", "max_image_pixels", "video_frames_per_s", "max_video_frames", "allow_remote_media")
"""Settings of ``data`` that only rows with images or videos, and tools that return some, read."""
_NOT_MISSED = frozenset({"ability", "id", "index", "prompt", "split", "uid"})
"""Columns that describe a row for people; no program is expected to read them."""


def data_notices(
    dataset: PromptDataset,
    config: Config,
    template: Any,
    reads_column: Callable[[str], bool],
    runs_code: Callable[[Prompt], bool],
    unread_settings: Callable[[Prompt], Collection[str]] = lambda prompt: (),
    *,
    takes_media: bool = True,
) -> list[Notice]:
    """``template`` is the tokenizer's chat template. ``reads_column`` is whether the reward function takes a column.
    ``runs_code`` is whether a tool, or the scorer of a prompt, runs code in the sandbox. ``unread_settings`` are those
    of ``reward`` that have no effect on the scorers of a prompt. ``takes_media`` is whether the model takes images.

    Some rows, spread over the dataset, stand for all.
    """
    every = max(1, len(dataset) // _NUM_ROWS)
    rows, is_dropped = range(0, len(dataset), every)[:_NUM_ROWS], config.rollout.on_failure == "drop"
    prompts = list(readable_prompts(dataset, rows, skips_unreadable=is_dropped))
    notices = list(_template_arguments(config.data.chat_template_args, template))
    notices += _endless_periods(config, len(dataset))
    if not takes_media and not config.data.dataset:  # a custom class may read all settings of data
        notices += _unread_media(config)
    if not any(map(runs_code, prompts)):
        notices += _unread_sandbox(config)
    notices += _unread_reward(config, [frozenset(unread_settings(prompt)) for prompt in prompts])
    notices += _missing_tools(prompts)
    notices += _template_without_tools(prompts, template)
    if not is_path(config.rollout.workflow):  # a custom workflow may read all of a row
        notices += _unread_tools(prompts, config.rollout.workflow)
        notices += _unread_columns(prompts, reads_column)
    return notices


def _template_arguments(arguments: Mapping[str, Any], template: Any) -> Iterator[Notice]:
    """``template`` is the text of the template, or a mapping or list of several; None if it is not known."""
    if not template:
        return
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", str(template)):
            yield Notice(
                f"data.chat_template_args.{name}",
                "has no effect, because the model's chat template does not mention it; remove it, or check its name",
            )


def _endless_periods(config: Config, num_prompts: int) -> Iterator[Notice]:
    """Periods in epochs of which not one ends within the run. The number of prompts is not known earlier."""
    trainer = config.trainer
    if trainer.total_epochs:  # the checks compare epochs with epochs, before the data are read
        return
    num_epochs = trainer.total_steps * trainer.num_prompts_per_step / num_prompts
    for key in ("eval.every_epochs", "trainer.checkpoint_every_epochs"):
        if value_at(config, key) > num_epochs:
            yield Notice(
                f"{key} = {value_at(config, key)}",
                f"has no effect, because trainer.total_steps = {trainer.total_steps} is {num_epochs:.3g} passes over "
                f"{num_prompts} training prompts; use {key.replace('epochs', 'steps')}, or more steps",
            )


def _unread_media(config: Config) -> Iterator[Notice]:
    for name in _OF_MEDIA:
        key = f"data.{name}"
        if value_at(config, key) != settings(Config)[key].default():
            yield Notice(
                f"{key} = {show(value_at(config, key))}",
                f"has no effect, because model.path = {config.model.path} takes only text; remove it, or use a vision "
                "model",
            )


def _unread_sandbox(config: Config) -> Iterator[Notice]:
    for key, setting in settings(Config).items():
        if key.startswith("sandbox.") and value_at(config, key) != setting.default():
            yield Notice(
                f"{key} = {show(value_at(config, key))}",
                "has no effect, because no tool and no scorer of this run runs code",
            )


def _unread_reward(config: Config, unread: Sequence[frozenset[str]]) -> Iterator[Notice]:
    """``unread`` are the names that no scorer of a prompt reads."""
    for name in sorted(frozenset.intersection(*unread)):
        key = f"reward.{name}"
        if value_at(config, key) != settings(Config)[key].default():
            yield Notice(
                f"{key} = {show(value_at(config, key))}",
                "has no effect, because the scorers of this run are called directly in its process",
            )


def _missing_tools(prompts: Sequence[Prompt]) -> Iterator[Notice]:
    for prompt in prompts:
        if prompt.extra_info.get("need_tools_kwargs") and not prompt.tools_kwargs:
            yield Notice(
                f"row {prompt.uid}", "has extra_info.need_tools_kwargs but no tools_kwargs; its tools get no arguments"
            )
            return


def _template_without_tools(prompts: Sequence[Prompt], template: Any) -> Iterator[Notice]:
    if template and any(prompt.tool_schemas for prompt in prompts) and not re.search(r"\btools\b", str(template)):
        yield Notice(
            "the chat template",
            "does not mention tools, so the model is not told about those of tools.use and tools.config; describe them "
            "in data.system_prompt, or set model.chat_template to a template that does",
        )


def _unread_tools(prompts: Sequence[Prompt], workflow: str) -> Iterator[Notice]:
    tools = sorted({name for prompt in prompts for name in prompt.tools_kwargs})
    if tools and not any(prompt.tool_schemas for prompt in prompts):
        yield Notice(
            "tools_kwargs of the rows",
            f"has no effect (tools: {', '.join(tools)}), because rollout.workflow = {workflow} calls no tools; set "
            "rollout.workflow=tool_agent and name the tools in tools.use or tools.config",
        )


def _unread_columns(prompts: Sequence[Prompt], reads_column: Callable[[str], bool]) -> Iterator[Notice]:
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    unread = [name for name in names if name not in _NOT_MISSED and not reads_column(name)]
    if unread:
        text = "nothing reads them; a reward function that has parameters of these names receives them"
        if all(prompt.ground_truth is None for prompt in prompts):
            text += (
                ". No row has a ground_truth, so a reward function receives None; if one of these columns has it, "
                "rename it, or give the source a name: data.train=mine data.sources.mine.source=FILE "
                f"data.sources.mine.columns.ground_truth={unread[0]}"
            )
        yield Notice(f"columns {', '.join(unread)}", text)
