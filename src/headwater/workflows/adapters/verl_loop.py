"""Runs agent loops for verl: classes whose ``run`` takes ``sampling_params`` and the columns of a row."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import Any

from headwater.core.errors import InvalidTrajectory, RolloutFailed
from headwater.core.records import Answer, Trajectory
from headwater.core.registry import nearest
from headwater.core.requests import SamplingParams
from headwater.workflows.adapters.binding import bind, construct, with_token_lists
from headwater.workflows.adapters.journal import Claim, Journal, open_journal
from headwater.workflows.adapters.pictures import ClassProcessor, Pictures
from headwater.workflows.adapters.verl import LLMServerClient, TokenOutput
from headwater.workflows.episode import Episode, EpisodeResult, WorkflowContext

EXTRA_SETTINGS = "verl_config"
"""The key of ``rollout.workflow_args`` with settings that a class reads from verl's config."""


def is_agent_loop(thing: object) -> bool:
    run = getattr(thing, "run", None) if inspect.isclass(thing) else None
    return run is not None and "sampling_params" in inspect.signature(run).parameters


class VerlConfig(dict[str, Any]):
    """Settings in verl's names, read as attributes or as keys."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the config has no {name!r} here ({nearest(name, list(self))}); add it to "
                f"rollout.workflow_args.{EXTRA_SETTINGS}, for example "
                f"{{actor_rollout_ref: {{rollout: {{{name}: ...}}}}}}"
            ) from None

    @classmethod
    def of(cls, tree: Mapping[str, Any], extra: Mapping[str, Any]) -> VerlConfig:
        """``tree`` with the values of ``extra`` added or replaced."""
        made = cls({name: cls.of(value, {}) if isinstance(value, Mapping) else value for name, value in tree.items()})
        for name, value in extra.items():
            if isinstance(value, Mapping):
                present = made.get(name)
                made[name] = cls.of(present if isinstance(present, Mapping) else {}, value)
            else:
                made[name] = value
        return made


def config_in_verl_names(context: WorkflowContext, extra: Mapping[str, Any]) -> VerlConfig:
    """The settings that agent loops read."""
    sampling = context.sampling
    lengths = {"prompt_length": context.max_prompt_tokens, "response_length": sampling.max_new_tokens}
    multi_turn = {
        "enable": True,
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "tool_config_path": None if context.tools is None else "tools.config",
        "format": "auto",
    }
    rollout = {**lengths, **sampling_in_verl_names(sampling), "calculate_log_probs": True, "multi_turn": multi_turn}
    data = {
        "max_prompt_length": context.max_prompt_tokens,
        "max_response_length": sampling.max_new_tokens,
        "apply_chat_template_kwargs": dict(context.chat_template_args),
        "tool_config_path": multi_turn["tool_config_path"],
    }
    return VerlConfig.of({"actor_rollout_ref": {"rollout": rollout, "model": {}}, "data": data}, extra)


def sampling_in_verl_names(sampling: SamplingParams) -> dict[str, Any]:
    """The settings that ``run`` receives, and passes on to ``generate``."""
    given: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": True,
    }
    rare = {
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop_strings),
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return {**given, **{name: value for name, value in rare.items() if value}}


_SAME_NAMES = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_LIMITS = ("max_tokens", "max_new_tokens")
_MINIMA = ("min_tokens", "min_new_tokens")
_IGNORED = (
    "logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_stop_str_in_output",
    "no_stop_trim",
)  # fmt: skip
"""Settings of the text of a response. Responses are tokens, which include those of a stop text."""
_KNOWN = (*_SAME_NAMES, *_LIMITS, *_MINIMA, *_IGNORED, "top_k", "stop", "stop_token_ids", "ignore_eos", "n")


def read_sampling(given: Mapping[str, Any], base: SamplingParams, room: int) -> SamplingParams:
    """``sampling_params`` of a request. What it leaves out is as in the recipe."""
    unknown = [name for name in given if name not in _KNOWN]
    if unknown:
        raise RolloutFailed(f"sampling_params: {unknown[0]!r} is not supported; {nearest(unknown[0], list(_KNOWN))}")
    if given.get("n", 1) != 1:
        raise RolloutFailed(f"sampling_params: n = {given['n']}: must be 1; call generate several times")
    values: dict[str, Any] = {name: given[name] for name in _SAME_NAMES if given.get(name) is not None}
    limit = next((given[name] for name in _LIMITS if given.get(name) is not None), room)
    values["max_new_tokens"] = min(room, int(limit))
    minimum = next((given[name] for name in _MINIMA if given.get(name) is not None), base.min_new_tokens)
    values["min_new_tokens"] = min(values["max_new_tokens"], int(minimum))
    if given.get("top_k") is not None:
        values["top_k"] = max(0, int(given["top_k"]))
    if given.get("stop") is not None:
        stop = given["stop"]
        values["stop_strings"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if given.get("stop_token_ids") is not None:
        values["stop_token_ids"] = tuple(given["stop_token_ids"])
    if given.get("ignore_eos") is not None:
        values["ignore_end"] = bool(given["ignore_eos"])
    try:
        return replace(base, **values)
    except (TypeError, ValueError) as error:
        raise RolloutFailed(f"sampling_params: {error}") from error


@dataclass(frozen=True)
class JournalServer(LLMServerClient):
    """``server_manager`` of one episode. Its requests go through the episode's journal."""

    journal: Journal

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        if unknown := [name for name, value in kwargs.items() if name.endswith("_data") and value]:
            raise RolloutFailed(f"generate was given {unknown[0]}; a model is shown only images and videos")
        contents = await self.journal.pictures.read_in_thread(image_data, video_data)
        room = self.journal.room(len(prompt_ids))
        sampling = read_sampling(sampling_params, self.journal.episode.context.sampling, room)
        response = await self.journal.generate(prompt_ids, sampling, contents)
        versions = response.output_versions or (0,)
        steps = {"global_steps": versions[-1], "min_global_steps": min(versions), "max_global_steps": max(versions)}
        return TokenOutput(response.output_tokens, response.output_logprobs, "completed", steps)


@dataclass(frozen=True)
class _Wrapped:
    """verl passes configs inside an object."""

    config: VerlConfig


class VerlWorkflow:
    """Runs a class for verl as a workflow. Every episode gets a new object, as in verl."""

    def __init__(self, loop: type, setting: str, arguments: Mapping[str, Any], context: WorkflowContext) -> None:
        own = {name: value for name, value in arguments.items() if name != EXTRA_SETTINGS}
        config = config_in_verl_names(context, arguments.get(EXTRA_SETTINGS, {}))
        self._pictures = Pictures(context)
        tokenizer = with_token_lists(context.tokenizer)
        offered = {
            "trainer_config": _Wrapped(config),
            "server_manager": None,
            "tokenizer": tokenizer,
            "processor": None if context.processor is None else ClassProcessor(self._pictures, tokenizer),
            "dataset_cls": None,
            "data_config": _Wrapped(config.data),
        }
        self._loop, self._setting = loop, setting
        self._bound = bind(loop, setting, own, offered)
        parameters = inspect.signature(loop.run).parameters.values()  # type: ignore[attr-defined]
        self._names = {each.name for each in parameters}
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)

    async def run(self, episode: Episode) -> EpisodeResult:
        async with open_journal(episode, self._pictures) as journal:
            loop = construct(self._loop, self._setting, {**self._bound, "server_manager": JournalServer(journal)})
            output = await loop.run(**await self._arguments(episode))
            if output is None:
                return None
            outputs = output if isinstance(output, list) else [output]
            return [await _trajectory(journal, each) for each in outputs]

    async def _arguments(self, episode: Episode) -> dict[str, Any]:
        """What ``run`` takes of the row. The first versions of verl passed ``messages`` only."""
        prompt = episode.prompt
        with_pictures = partial(self._pictures.messages, prompt.messages, prompt.media)
        # In a thread, because other episodes would wait while pictures are decoded.
        messages = await asyncio.to_thread(with_pictures) if prompt.media else with_pictures()
        row = {
            **prompt.columns,
            "raw_prompt": messages,
            "messages": messages,
            "raw_prompt_ids": list(prompt.tokens),
            "data_source": prompt.data_source,
            "reward_model": {**_mapping(prompt.columns.get("reward_model")), "ground_truth": prompt.ground_truth},
            "extra_info": dict(prompt.extra_info),
            "tools_kwargs": dict(prompt.tools_kwargs),
            "index": prompt.extra_info.get("index", 0),
            "uid": prompt.uid,
            "multi_modal_data": await self._pictures.by_kind([item.content for item in prompt.media]),
        }
        taken = row if self._takes_any else {name: value for name, value in row.items() if name in self._names}
        return {**taken, "sampling_params": sampling_in_verl_names(episode.context.sampling)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


async def _trajectory(journal: Journal, output: Any) -> Trajectory:
    """The trajectory of an ``AgentLoopOutput``, which may be verl's own class."""
    try:
        prompt_ids, response_ids = list(map(int, output.prompt_ids)), list(map(int, output.response_ids))
        mask, logprobs = list(map(int, output.response_mask)), output.response_logprobs
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidTrajectory(
            f"row {journal.episode.prompt.uid}: run returned a {type(output).__name__} that cannot be read ({error}); "
            "return an AgentLoopOutput"
        ) from error
    claim = Claim(
        tokens=(*prompt_ids, *response_ids),
        mask=(*[0] * len(prompt_ids), *mask),
        logprobs=None if logprobs is None else (*[0.0] * len(prompt_ids), *logprobs),
        prompt_length=len(prompt_ids),
    )
    metrics = asdict(output.metrics) if is_dataclass(output.metrics) else dict(output.metrics or {})  # type: ignore[arg-type]
    info = {**output.extra_fields, "num_turns": output.num_turns, "loop_metrics": metrics}
    if output.reward_score is not None:
        return journal.trajectory(claim, float(output.reward_score), info)
    context, prompt = journal.episode.context, journal.episode.prompt
    # verl decodes everything after the prompt for its reward functions, including the text of tools.
    text = context.tokenizer.decode(response_ids, skip_special_tokens=True)
    return journal.trajectory(claim, await context.reward.score(Answer(prompt, text)), info)
