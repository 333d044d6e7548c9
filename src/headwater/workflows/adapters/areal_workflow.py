"""Runs workflows for AReaL: classes with ``arun_episode(engine, data)`` whose ``data`` is a dict of the row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.core.errors import ConfigError, InvalidTrajectory, RolloutFailed
from headwater.core.records import Prompt, Trajectory
from headwater.core.registry import blaming, is_path, load_object
from headwater.core.requests import SamplingParams
from headwater.workflows.adapters import areal
from headwater.workflows.adapters.areal_reward import RunReward
from headwater.workflows.adapters.binding import bind, construct, constructor_parameters, with_token_lists
from headwater.workflows.adapters.journal import Claim, Journal, open_journal
from headwater.workflows.adapters.pictures import ClassProcessor, Pictures
from headwater.workflows.episode import Episode, EpisodeResult, WorkflowContext

_REWARD_ARGUMENTS = ("prompt", "completion", "completions", "prompt_ids", "completion_ids")
"""Workflows pass these and ``**data`` to their reward function, so ``data`` must not have them."""


_AREAL_PARAMETERS = {"reward_fn", "gconfig", "tokenizer"}


def is_areal_workflow(thing: object) -> bool:
    """Whether a class is constructed as in AReaL. Others take a ``WorkflowContext`` and use Headwater's own records."""
    if not inspect.isclass(thing) or not hasattr(thing, "arun_episode"):
        return False
    is_derived = any(each.__name__ == "RolloutWorkflow" for each in thing.__mro__[1:])
    return is_derived or not _AREAL_PARAMETERS.isdisjoint(constructor_parameters(thing)[0])


@dataclass(frozen=True)
class JournalEngine(areal.InferenceEngine):
    """``engine`` of one episode. Its requests go through the episode's journal."""

    journal: Journal

    async def agenerate(self, req: areal.ModelRequest) -> areal.ModelResponse:
        tokens = list(map(int, req.input_ids))
        sampling = read_gconfig(req.gconfig, self.journal, len(tokens))
        contents = await self.journal.pictures.read_in_thread(req.image_data)
        response = await self.journal.generate(tokens, sampling, contents)
        return areal.ModelResponse(
            tokens,
            list(response.output_tokens),
            list(response.output_logprobs),
            list(response.output_versions),
            response.stop_reason,
            tokenizer=req.tokenizer,
            latency=response.queue_s + response.generate_s,
            ttft=response.queue_s,
        )

    def get_version(self) -> int:
        """The newest policy version that has answered a request of this episode."""
        return self.journal.newest_version


def gconfig_of(sampling: SamplingParams) -> areal.GenerationHyperparameters:
    """The sampling settings of the recipe. ``n_samples`` is 1: Headwater runs one episode for each sample."""
    return areal.GenerationHyperparameters(
        n_samples=1,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        greedy=sampling.temperature == 0,
        top_p=sampling.top_p,
        top_k=sampling.top_k or areal.ALL_TOKENS,
        temperature=sampling.temperature,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings) or None,
    )


def read_gconfig(gconfig: Any, journal: Journal, num_input: int) -> SamplingParams:
    """The sampling settings of a request."""
    if gconfig.n_samples != 1:
        raise RolloutFailed(
            f"gconfig.n_samples = {gconfig.n_samples}: a request has one response; use gconfig.new(n_samples=1) and "
            "set rollout.num_samples_per_prompt"
        )
    limit = min(journal.room(num_input), gconfig.max_new_tokens, gconfig.max_tokens - num_input)
    try:
        return replace(
            journal.episode.context.sampling,
            max_new_tokens=limit,
            min_new_tokens=min(gconfig.min_new_tokens, limit),
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=0 if gconfig.top_k >= areal.ALL_TOKENS or gconfig.top_k < 0 else gconfig.top_k,
            stop_token_ids=tuple(gconfig.stop_token_ids),
            stop_strings=tuple(gconfig.stop or ()),
            frequency_penalty=gconfig.frequency_penalty,
        )
    except (TypeError, ValueError) as error:
        raise RolloutFailed(f"gconfig: {error}") from error


async def row_of(prompt: Prompt, pictures: Pictures) -> dict[str, Any]:
    """``data`` of an episode: the columns of the row, the messages of its prompt, its images, and what scores it."""
    shown = await pictures.by_kind([item.content for item in prompt.media if item.content.kind == "image"])
    columns = {name: value for name, value in prompt.columns.items() if name not in _REWARD_ARGUMENTS}
    return {
        "query_id": prompt.uid,
        "answer": prompt.ground_truth,
        **columns,
        "messages": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        **({"images": shown["image"]} if shown else {}),
    }


class ArealWorkflow:
    """Runs a class for AReaL as a workflow."""

    def __init__(self, made: type, setting: str, arguments: Mapping[str, Any], context: WorkflowContext) -> None:
        gconfig = gconfig_of(context.sampling)
        own = dict(arguments)
        if isinstance(changes := own.get("gconfig"), Mapping):
            own["gconfig"] = _changed(gconfig, changes)
        if isinstance(reward := own.get("reward_fn"), str):
            own["reward_fn"] = _reward_function(reward)
        self._pictures = Pictures(context)
        tokenizer = with_token_lists(context.tokenizer)
        offered = {
            "reward_fn": RunReward(context),
            "gconfig": gconfig,
            "tokenizer": tokenizer,
            "processor": None if context.processor is None else ClassProcessor(self._pictures, tokenizer),
            "enable_thinking": bool(context.chat_template_args.get("enable_thinking", False)),
        }
        self._made = construct(made, setting, bind(made, setting, own, offered))

    async def run(self, episode: Episode) -> EpisodeResult:
        async with open_journal(episode, self._pictures) as journal:
            row = await row_of(episode.prompt, self._pictures)
            result = await self._made.arun_episode(JournalEngine(journal), row)
            if result is None:
                return None
            return [_trajectory(journal, row) for row in _rows(result, episode.prompt.uid)]


def _changed(gconfig: areal.GenerationHyperparameters, changes: Mapping[str, Any]) -> areal.GenerationHyperparameters:
    try:
        return gconfig.new(**changes)
    except TypeError as error:
        raise ConfigError([f"rollout.workflow_args.gconfig: {error}"]) from error


def _reward_function(path: str) -> Callable[..., Any]:
    """A function by its path. AReaL writes ``package.module.function``."""
    setting = f"rollout.workflow_args.reward_fn = {path}"
    if not is_path(path):
        path = ":".join(path.rpartition(".")[::2])
    with blaming(setting):
        function: Callable[..., Any] = load_object(path)
    return function


def _rows(result: Any, uid: str) -> list[dict[str, Any]]:
    """The sequences in what a class returned: tensors ``[sequences, tokens]``, or interactions that make such."""
    if not hasattr(result, "keys") or not result.keys():
        raise InvalidTrajectory(
            f"row {uid}: arun_episode returned a {type(result).__name__}; return a dict of tensors with input_ids, "
            "loss_mask and rewards, or None to reject the episode"
        )
    values = [result[name] for name in result.keys()]  # noqa: SIM118  a TensorDict iterates over its rows
    if all(hasattr(value, "to_tensor_dict") for value in values):
        return [row for value in values for row in _rows(value.to_tensor_dict(), uid)]
    columns = {name: result[name] for name in result.keys() if hasattr(result[name], "shape")}  # noqa: SIM118
    missing = {"input_ids", "loss_mask", "rewards"} - columns.keys()
    if missing:
        raise InvalidTrajectory(f"row {uid}: the result of arun_episode has no tensor {', '.join(sorted(missing))!r}")
    if columns["input_ids"].ndim != 2:
        raise InvalidTrajectory(
            f"row {uid}: input_ids has {columns['input_ids'].ndim} dimensions; return [sequences, tokens]"
        )
    return [_row(columns, number) for number in range(columns["input_ids"].shape[0])]


def _row(columns: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One sequence, without its padding."""
    width = columns["input_ids"].shape[1]
    keep: Sequence[int] = range(width)
    if "attention_mask" in columns:
        keep = columns["attention_mask"][number].nonzero()[:, 0].tolist()
    row: dict[str, Any] = {"rewards": float(columns["rewards"].reshape(-1)[number])}
    for name in ("input_ids", "loss_mask", "logprobs", "versions"):
        if name in columns:
            values = columns[name][number].tolist()
            row[name] = [values[place] for place in keep]
    return row


def _trajectory(journal: Journal, row: Mapping[str, Any]) -> Trajectory:
    claim = Claim(
        tokens=tuple(map(int, row["input_ids"])),
        mask=tuple(map(int, row["loss_mask"])),
        logprobs=row.get("logprobs"),
        versions=None if "versions" not in row else tuple(map(int, row["versions"])),
    )
    return journal.trajectory(claim, row["rewards"])
