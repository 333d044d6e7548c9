"""Groups: the trajectories of one prompt. A group is trained on as a whole, or dropped with a reason.

``pad_trajectories`` makes one padded batch of trajectories.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError, RolloutFailed
from headwater.core.media import MEDIA_COLUMN, Media, MediaContent
from headwater.core.records import NOT_SAMPLED, DropKind, Prompt, TokenArrays, Trajectory, make_arrays
from headwater.core.tool_calls import ToolFailure


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """A row that was drawn and cannot be made a prompt, for example because its image is gone or damaged."""

    uid: str
    error: DataError


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """A prompt to run, and the key from which the randomness of its samples is derived."""

    row: Prompt | UnreadableRow
    rng_key: int
    index: int = -1
    """The row of the dataset; -1 if the prompt does not come from a dataset."""
    epoch: int = 0

    @property
    def uid(self) -> str:
        return self.row.uid

    @property
    def prompt(self) -> Prompt:
        """The prompt, or the error of a row that cannot be read."""
        if isinstance(self.row, UnreadableRow):
            raise self.row.error
        return self.row


_HIGHEST_LOGPROB = 1e-3
"""A probability is at most 1, so its logarithm is at most 0. The rest is for rounding."""


@dataclass(frozen=True)
class TrajectoryLimits:
    """What the trajectories of a workflow must fulfil. A workflow may be custom code, so nothing it returns is
    trusted: a token outside the vocabulary ends a GPU process, and a version from the future is never too old."""

    vocab_size: int
    max_new_tokens: int
    """``rollout.max_new_tokens``, or ``eval.max_new_tokens``."""
    max_prompt_tokens: int
    """``data.max_prompt_tokens``."""
    get_version: Callable[[], int]
    """The policy version that the engine serves now."""
    key: str = "rollout.max_new_tokens"
    """The setting that ``max_new_tokens`` comes from."""

    def problem(self, trajectory: Trajectory, prompt: Prompt, *, newest_seen: int) -> str | None:
        """Why a trajectory cannot be trained on, or None. ``newest_seen`` is the newest version in its responses."""
        newest = max(newest_seen, self.get_version())
        if self._is_plainly_right(trajectory, prompt, newest):
            return self._wrong_length(trajectory, prompt)
        tokens, versions = np.asarray(trajectory.tokens), np.asarray(trajectory.versions)
        for name, array in (("tokens", tokens), ("versions", versions)):
            if array.dtype.kind not in "iu":
                return f"{name} contains {_first_odd(getattr(trajectory, name))}; all of them must be whole numbers"
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            return f"token {wrong} is not in the vocabulary, 0..{self.vocab_size - 1}"
        if versions.max() > newest:
            return f"a token of policy version {versions.max()}, but the newest version is {newest}"
        if versions.min() < NOT_SAMPLED:
            return f"a token of policy version {versions.min()}; use {NOT_SAMPLED} for tokens that were not sampled"
        return self._wrong_length(trajectory, prompt) or _wrong_logprob(trajectory)

    def _is_plainly_right(self, trajectory: Trajectory, prompt: Prompt, newest: int) -> bool:
        """Whether all numbers are of Python's own types and in their ranges, which almost all are. For short responses
        this is several times as fast as arrays."""
        tokens, versions, logprobs = trajectory.tokens, trajectory.versions, trajectory.logprobs
        if _begins_with(prompt, tokens, versions, logprobs):  # usually most of the tokens
            start = len(prompt.tokens)
            tokens, versions, logprobs = tokens[start:], versions[start:], logprobs[start:]
        if {*map(type, tokens), *map(type, versions)} != {int} or {*map(type, logprobs)} != {float}:
            return False
        are_tokens = min(trajectory.tokens) >= 0 and max(trajectory.tokens) < self.vocab_size
        are_versions = min(versions) >= NOT_SAMPLED and max(versions) <= newest
        # A sum is finite only if all of its terms are.
        return are_tokens and are_versions and math.isfinite(sum(logprobs)) and max(logprobs) <= _HIGHEST_LOGPROB

    def _wrong_length(self, trajectory: Trajectory, prompt: Prompt) -> str | None:
        length = len(trajectory.tokens) - trajectory.prompt_length
        if length > self.max_new_tokens:
            return f"a response of {length} tokens; {self.key} = {self.max_new_tokens} is the limit"
        longest = max(self.max_prompt_tokens, len(prompt.tokens)) + self.max_new_tokens
        if len(trajectory.tokens) > longest:
            return (
                f"{len(trajectory.tokens)} tokens; data.max_prompt_tokens + {self.key} = {longest} is the "
                "limit of prompt and response together"
            )
        return None


def _begins_with(prompt: Prompt, tokens: Sequence[int], versions: Sequence[int], logprobs: Sequence[float]) -> bool:
    """Whether tokens, versions and log-probs begin with those of the prompt, which no policy sampled."""
    if not (type(tokens) is type(versions) is type(logprobs) is tuple):
        return False
    count = len(prompt.tokens)
    is_sampled = versions[:count] != (NOT_SAMPLED,) * count or logprobs[:count] != (0.0,) * count
    return not is_sampled and tokens[:count] == prompt.tokens


def _wrong_logprob(trajectory: Trajectory) -> str | None:
    try:
        logprobs = np.asarray(trajectory.logprobs, dtype=np.float64)
    except (TypeError, ValueError):
        return f"logprobs contains {_first_odd(trajectory.logprobs)}; all of them must be numbers"
    is_wrong = ~(logprobs <= _HIGHEST_LOGPROB) | (logprobs == -np.inf)
    if is_wrong.any():
        return f"a log-prob of {logprobs[is_wrong][0]:g}; log-probs must be finite and at most 0"
    return None


def _first_odd(values: Sequence[Any]) -> str:
    """The first value that is not an integer, for a message."""
    odd = next((each for each in values if isinstance(each, bool) or not isinstance(each, (int, np.integer))), values)
    return f"{str(odd)[:40]!r} ({type(odd).__name__})"


@dataclass(frozen=True, slots=True)
class Group:
    """All trajectories of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    baseline: float | None = None
    """The reward of the greedy response, if the algorithm asked for one."""
    num_lost: int = 0
    """Samples that failed and were left out."""

    def __post_init__(self) -> None:
        strangers = [each.uid for each in self.trajectories if each.uid != self.prompt.uid]
        if strangers:
            raise ValueError(f"group of prompt {self.prompt.uid} holds a trajectory of {strangers[0]}")

    def episode_rewards(self) -> list[float]:
        """One reward per episode: the mean over its pieces."""
        rewards: dict[int, list[float]] = {}
        for each in self.trajectories:
            rewards.setdefault(each.sample, []).append(each.reward)
        # The exact mean: pieces with equal rewards give exactly that reward.
        return [each[0] if len(each) == 1 else statistics.mean(each) for each in rewards.values()]

    def oldest_version(self) -> int | None:
        """The oldest policy version among the trained tokens; None if no token is trained."""
        trained = (compress(each.versions, each.loss_mask) for each in self.trajectories)
        return min(map(int, chain.from_iterable(trained)), default=None)

    def without_older(self, version: int) -> tuple[Group, int]:
        """Remove tokens older than ``version`` from the loss. Returns the new group and the number of such tokens."""
        masked = [_mask_older(each, version) for each in self.trajectories]
        return replace(self, trajectories=tuple(each for each, _ in masked)), sum(count for _, count in masked)


def _mask_older(trajectory: Trajectory, version: int) -> tuple[Trajectory, int]:
    arrays = trajectory.arrays
    mask = arrays.loss_mask & (arrays.versions >= version)
    num_masked = int(arrays.loss_mask.sum() - mask.sum())
    return (trajectory.with_loss_mask(mask) if num_masked else trajectory), num_masked


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that is not trained on, and why."""

    uid: str
    kind: DropKind
    message: str
    """The cause in words, for people."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """How long a group took."""

    total_s: float
    """From the start of its episodes to the last reward."""
    queue_s: tuple[float, ...]
    """Per request, how long it waited for a place in the engine."""
    generate_s: tuple[float, ...]
    """Per request, the time from its place in the engine to its last token."""
    episodes: tuple[Mapping[str, float], ...] = ()
    """Per episode, the seconds that it took (``total``) and spent on each kind of work (``EpisodeState.seconds``)."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The input of one training step, and the groups that were dropped while it was collected."""

    groups: tuple[Group, ...]
    dropped: tuple[Dropped, ...] = ()
    num_masked_tokens: int = 0
    """Sampled tokens that were removed from the loss because they are too old."""
    times: tuple[GroupTimes, ...] = ()
    """Of the groups that this process has run, without those that a checkpoint restored."""

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def with_trajectories(self, change: Callable[[Trajectory], Trajectory]) -> RolloutBatch:
        """The same batch with every trajectory changed."""
        groups = (replace(each, trajectories=tuple(map(change, each.trajectories))) for each in self.groups)
        return replace(self, groups=tuple(groups))

    def group_numbers(self) -> torch.Tensor:
        """``[trajectories]``: the number of each trajectory's group."""
        return torch.tensor([number for number, group in enumerate(self.groups) for _ in group.trajectories])

    def episode_numbers(self) -> torch.Tensor:
        """``[trajectories]``: the number of each one's episode; pieces of one episode share it."""
        numbers: dict[tuple[int, int], int] = {}
        for group_number, group in enumerate(self.groups):
            for each in group.trajectories:
                numbers.setdefault((group_number, each.sample), len(numbers))
        return torch.tensor(
            [numbers[number, each.sample] for number, group in enumerate(self.groups) for each in group.trajectories]
        )

    def baselines(self) -> torch.Tensor | None:
        """``[trajectories]``: the greedy reward of each trajectory's prompt; None if no baseline was computed."""
        if any(group.baseline is None for group in self.groups):
            return None
        return torch.tensor([group.baseline for group in self.groups for _ in group.trajectories])


class ScoredResponse(Protocol):
    """What metrics read of a ``Trajectory``."""

    @property
    def uid(self) -> str: ...
    @property
    def sample(self) -> int: ...
    @property
    def reward(self) -> float: ...
    @property
    def reward_info(self) -> Mapping[str, Any]: ...
    @property
    def info(self) -> Mapping[str, Any]: ...


def num_replies(trajectory: Trajectory) -> int:
    """Messages of the model among the tokens."""
    is_sampled = trajectory.arrays.versions != NOT_SAMPLED
    return int(np.count_nonzero(is_sampled[1:] > is_sampled[:-1]))


def num_turns(trajectories: Sequence[ScoredResponse]) -> list[int]:
    """Of each, what the workflow counted, which may include other pieces of the episode, or else ``num_replies``."""
    others = [each for each in trajectories if not isinstance(each.info.get("num_turns"), int)]
    replies = iter(_all_num_replies(others) if others else ())
    return [noted if isinstance(noted := each.info.get("num_turns"), int) else next(replies) for each in trajectories]


def _all_num_replies(trajectories: Sequence[ScoredResponse]) -> list[int]:
    """``num_replies`` of each. Many short trajectories take a fraction of the time together."""
    versions = [each.arrays.versions for each in trajectories if isinstance(each, Trajectory)]
    assert len(versions) == len(trajectories), "other records note their turns"
    starts = np.cumsum([0, *(len(each) for each in versions[:-1])])
    is_sampled = np.concatenate(versions) != NOT_SAMPLED
    begins = np.append(False, is_sampled[1:] > is_sampled[:-1])
    begins[starts] = False  # the token before belongs to another trajectory
    counts: list[int] = np.add.reduceat(begins, starts, dtype=np.int64).tolist()
    return counts


def episode_metrics(trajectories: Sequence[ScoredResponse]) -> dict[str, float]:
    """The model's turns, and means over trajectories of what their workflow noted in ``info`` about turns and tools
    (docs/agents.md)."""
    infos = [each.info for each in trajectories]
    turns = num_turns(trajectories)
    metrics: dict[str, float] = {
        "episode/turns": statistics.fmean(turns),
        "episode/turns_min": min(turns),
        "episode/turns_max": max(turns),
    }
    if ends := Counter(info["ended_by"] for info in infos if isinstance(info.get("ended_by"), str)):
        metrics |= {f"episode/ended_by/{reason}": count / ends.total() for reason, count in sorted(ends.items())}
    refused: Counter[str] = Counter()
    for info in infos:
        if isinstance(info.get("refused_calls"), Mapping):
            refused.update(info["refused_calls"])
    metrics |= {f"episode/refused_calls/{code}": float(count) for code, count in sorted(refused.items())}
    noted = [info for info in infos if info.keys() >= _TOOL_NOTES]
    if not noted:
        return metrics
    num_calls = sum(info["num_tool_calls"] for info in noted)
    failures = _mean_counts(noted, "tool_failures")
    metrics["tools/calls"] = num_calls / len(noted)
    metrics["tools/failed_fraction"] = sum(failures.values()) * len(noted) / max(1, num_calls)
    metrics |= {f"tools/failures/{kind}": failures.get(kind, 0.0) for kind in get_args(ToolFailure)}
    metrics |= {f"tools/calls/{name}": count for name, count in _mean_counts(noted, "tool_calls").items()}
    metrics |= {f"tools/rewards/{name}": reward for name, reward in _mean_counts(noted, "tool_rewards").items()}
    for name in sorted({name for info in noted for name in info["tool_metrics"]}):
        known = [info["tool_metrics"][name] for info in noted if name in info["tool_metrics"]]
        metrics[f"tools/{name}"] = statistics.fmean(known)
    metrics["time/tools_per_episode_s"] = statistics.fmean(info["tool_s"] for info in noted)
    return metrics


_TOOL_NOTES = {"num_tool_calls", "tool_calls", "tool_failures", "tool_rewards", "tool_metrics", "tool_s", "ended_by"}
"""What the workflow ``tool_agent`` notes. Another workflow may note the same, all of it."""


def _mean_counts(infos: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """The mapping ``key`` of each info, added up and divided by their number."""
    names = sorted({name for info in infos for name in info[key]})
    return {name: sum(info[key].get(name, 0.0) for info in infos) / len(infos) for name in names}


def reward_metrics(rollouts: Sequence[tuple[Prompt, ScoredResponse]]) -> dict[str, float]:
    """``reward/<data source>/mean``, and ``reward/<name>/mean`` of the numbers that the scorer returned beside it.

    Pieces of one episode count as one, with the mean of their values.
    """
    pieces: dict[tuple[str, str, str, int], list[float]] = {}
    for prompt, each in rollouts:
        values = {name: value for name, value in each.reward_info.items() if _is_number(value)}
        for name, value in {"": each.reward, **values}.items():
            pieces.setdefault((name, prompt.data_source, each.uid, each.sample), []).append(float(value))
    metrics: dict[str, list[float]] = {}
    for (name, source, _, _), values_of_pieces in pieces.items():
        mean = statistics.fmean(values_of_pieces)
        keys = [f"reward/{source}/{name}/mean", f"reward/{name}/mean"] if name else [f"reward/{source}/mean"]
        for key in keys:
            metrics.setdefault(key, []).append(mean)
    return {key: statistics.fmean(values) for key, values in metrics.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.number)) and bool(np.isfinite(value))


def too_few(groups: Sequence[object], dropped: Sequence[Dropped]) -> RolloutFailed:
    """The error of a step that cannot collect enough groups."""
    causes = "\n".join(f"  - {each.uid}: {each.message}" for each in dropped[:3])
    kinds = {each.kind for each in dropped}
    remedies = [
        (DropKind.FILTERED in kinds, _FILTERED_REMEDY),
        (DropKind.REFUSED in kinds, _REFUSED_REMEDY),
        (DropKind.STALE in kinds, _STALE_REMEDY),
        (DropKind.UNREADABLE_ROW in kinds, _UNREADABLE_REMEDY),
        (any(kind.is_failure for kind in kinds - {DropKind.UNREADABLE_ROW}), _FAILED_REMEDY),
    ]
    remedy = "; ".join(text for applies, text in remedies if applies)
    return RolloutFailed(
        f"{len(dropped)} groups of this step were dropped and only {len(groups)} are complete; the first causes "
        f"({remedy}):\n{causes}"
    )


_FILTERED_REMEDY = (
    "if all responses to a prompt get the same reward, use prompts of another difficulty, raise "
    "algorithm.max_filter_rounds, or set algorithm.filter_groups=false"
)
_REFUSED_REMEDY = "if rollout.should_accept refuses too many groups, make it accept more of them, or remove it"
_STALE_REMEDY = "if groups are too old, raise rollout.max_staleness or set rollout.on_stale=mask"
_UNREADABLE_REMEDY = "if rows cannot be read, fix the data, or remove these rows"
_FAILED_REMEDY = "if a failure is temporary, raise rollout.max_retries"


def pad_trajectories(trajectories: Sequence[Trajectory], pad_token_id: int) -> DataProto:
    """Left-pad the prompts and right-pad the responses.

    ``input_ids``, ``attention_mask`` and ``position_ids`` are ``[samples, prompt + response]``; ``response_mask`` (the
    loss mask), ``rollout_logprobs``, ``versions`` and ``rewards`` are ``[samples, response]``. The reward is on the
    last trained token; on the last token if none is trained; in the first column if there is no response, because the
    group still needs it for comparison. A reward of a turn is on the last token of that turn, also if the turn became
    too old to train on: its reward must not be credited to later turns.

    If a trajectory has images or videos, the object column ``media`` has those of every row. Their indices count the
    tokens of the row without padding.
    """
    make_arrays(trajectories)
    prompts = np.array([each.prompt_length for each in trajectories], np.int64)
    lengths = np.array([len(each.tokens) for each in trajectories], np.int64) - prompts
    prompt_width, response_width = int(prompts.max(initial=0)), int(lengths.max(initial=1))
    places = np.arange(-prompt_width, response_width)
    is_token = (places >= -prompts[:, None]) & (places < lengths[:, None])

    def padded(column: Callable[[TokenArrays], NDArray[Any]], dtype: type[np.generic], fill: int = 0) -> NDArray[Any]:
        """All trajectories at once: operations on each of many short ones would take most of the time."""
        values = np.full(is_token.shape, fill, dtype)
        if trajectories:
            values[is_token] = np.concatenate([column(each.arrays) for each in trajectories])
        return values

    input_ids = padded(lambda arrays: arrays.tokens, np.int64, pad_token_id)
    response_mask, logprobs, versions = (
        np.ascontiguousarray(each[:, prompt_width:])
        for each in (
            padded(lambda arrays: arrays.loss_mask, np.float32),
            padded(lambda arrays: arrays.logprobs, np.float32),
            padded(lambda arrays: arrays.versions, np.int64, NOT_SAMPLED),
        )
    )
    rewards = np.zeros_like(response_mask)
    whole = [0.0 if each.turn_rewards else each.reward for each in trajectories]
    rewards[np.arange(len(trajectories)), score_columns(trajectories, response_mask)] = whole
    for row, each in enumerate(trajectories):
        if each.turn_rewards:
            rewards[row, [end - each.prompt_length for end in each.turn_ends]] = each.turn_rewards
    attended = torch.from_numpy(is_token.astype(np.int64))
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": attended,
            "position_ids": (attended.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": torch.from_numpy(response_mask),
            "rollout_logprobs": torch.from_numpy(logprobs),
            "versions": torch.from_numpy(versions),
            "rewards": torch.from_numpy(rewards),
        },
        non_tensors={
            "uid": [each.uid for each in trajectories],
            "sample": [each.sample for each in trajectories],
            **({MEDIA_COLUMN: _shared_media(trajectories)} if any(each.media for each in trajectories) else {}),
        },
    )


def _shared_media(trajectories: Sequence[Trajectory]) -> list[Media]:
    """The media of each row. Equal contents are one object, so that a batch that is sent contains their bytes once."""
    contents: dict[str, MediaContent] = {}

    def shared(media: Media) -> Media:
        known = [contents.setdefault(item.content.digest, item.content) for item in media]
        if all(content is item.content for content, item in zip(known, media, strict=True)):
            return media
        return tuple(replace(item, content=content) for content, item in zip(known, media, strict=True))

    return [shared(each.media) for each in trajectories]


def score_columns(trajectories: Sequence[Trajectory], response_mask: NDArray[np.float32]) -> NDArray[np.int64]:
    """The response column of each trajectory's reward. ``response_mask`` is that of ``pad_trajectories``."""
    last = response_mask.shape[1] - 1 - (response_mask[:, ::-1] != 0).argmax(axis=1)
    ends = np.array([len(each.tokens) - each.prompt_length - 1 for each in trajectories], np.int64)
    return np.where(response_mask.any(axis=1), last, ends.clip(min=0))


def add_to_scores(rewards: torch.Tensor, scores: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Add one score per trajectory to ``rewards`` ``[samples, response]``, in its column of ``score_columns``."""
    return rewards.index_put((torch.arange(len(rewards)), columns), scores.to(rewards.dtype), accumulate=True)
