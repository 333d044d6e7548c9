"""Runs the episodes of one prompt. The result is a complete group, or the reason why there is none.

A filter decides whether a complete group is worth training on.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from headwater.core.errors import (
    AgentFailed,
    AgentTimedOut,
    ConfigError,
    HeadwaterError,
    InvalidTrajectory,
    RewardFailed,
    RewardTimedOut,
    RolloutFailed,
    RunError,
)
from headwater.core.protocols import EpisodeEngine, EpisodeInput, is_not_awaited
from headwater.core.records import DropKind, Prompt, Trajectory
from headwater.core.registry import blaming, is_path, load_object
from headwater.core.requests import derive_key
from headwater.rollout.flight import Flight
from headwater.rollout.group import Dropped, Group, TrajectoryLimits, UnreadableRow
from headwater.workflows import Episode, EpisodeRunner

logger = logging.getLogger(__name__)

GroupFilter = Callable[[Group], bool]
"""Whether a group is kept."""

REASONS = {
    DropKind.FILTERED: "all samples have the same reward (algorithm.filter_groups)",
    DropKind.REFUSED: "rollout.should_accept returned false",
}


def scores_differ(group: Group) -> bool:
    return len(set(group.episode_rewards())) > 1


def load_should_accept(path: str) -> GroupFilter:
    """The function that ``rollout.should_accept`` names, called with the trajectories of a group.

    An error in it, or a result other than true or false, is a failure of the group and never a decision.
    """
    setting = f"rollout.should_accept = {path}"
    if not is_path(path):
        raise ConfigError([f"{setting}: write it as 'path/to/file.py:function' or 'package.module:function'"])
    with blaming(setting):
        function = load_object(path)
    if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise ConfigError([f"{setting}: must be a plain function, which takes a list of trajectories"])

    def accepts(group: Group) -> bool:
        try:
            result: Any = function(list(group.trajectories))
        except HeadwaterError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise RolloutFailed(
                f"{setting} on row {group.prompt.uid} raised {type(error).__name__}: {error}; fix it, or set "
                "rollout.on_failure=drop to drop and count such rows"
            ) from error
        if not isinstance(result, (bool, np.bool_)):
            raise RolloutFailed(
                f"{setting} on row {group.prompt.uid} returned {str(result)[:40]!r}; return True or False"
            )
        return bool(result)

    return accepts


_FEWEST_SAMPLES = 2
"""The smallest partial group: a single sample has nothing to be compared with."""

GREEDY = -1
"""The sample number of the greedy episode, of which only the reward is used."""


class GroupRunner:
    """Runs ``num_samples`` episodes per prompt, concurrently.

    The whole group is dropped if the workflow rejects an episode (``None``), if one of ``filters`` does not keep the
    group, or, with ``on_failure="drop"``, if an episode fails or the row cannot be read. A group whose episode fails is
    first retried ``max_retries`` times. With ``allow_partial_groups``, a group continues without the samples that
    failed, as long as two or more are left. ``greedy`` runs one more episode per prompt, for its reward.
    """

    def __init__(
        self,
        workflow: EpisodeRunner,
        *,
        num_samples: int,
        on_failure: Literal["stop", "drop"],
        max_retries: int = 0,
        allow_partial_groups: bool = False,
        greedy: EpisodeRunner | None = None,
        filters: Mapping[DropKind, GroupFilter] | None = None,
        limits: TrajectoryLimits | None = None,
    ) -> None:
        """Without ``limits``, only the type of what a workflow returns is checked. ``filters`` are asked in order; a
        group that one of them does not keep is dropped with its kind."""
        self._workflow = workflow
        self._num_samples = num_samples
        self._on_failure = on_failure
        self._max_retries = max_retries
        self._allow_partial_groups = allow_partial_groups
        self._greedy = greedy
        self._filters = filters or {}
        self._limits = limits

    @property
    def num_episodes(self) -> int:
        return self._num_samples + (self._greedy is not None)

    async def run(self, flight: Flight, engine_of: Callable[[int], EpisodeEngine]) -> Group | Dropped:
        """``engine_of`` returns the engine for the episode of a sample."""
        try:
            return await self._run(flight, engine_of)
        finally:
            if flight.start is not None:
                flight.start.announce(flight)

    async def _run(self, flight: Flight, engine_of: Callable[[int], EpisodeEngine]) -> Group | Dropped:
        row = flight.dispatch.draw.row
        if isinstance(row, UnreadableRow):
            if self._on_failure == "stop":
                raise row.error
            return Dropped(row.uid, DropKind.UNREADABLE_ROW, str(row.error))
        for num_left in reversed(range(self._max_retries + 1)):
            flight.episodes.clear()
            try:
                return self._accepted(await self._run_once(flight, engine_of))
            except (RewardFailed, RolloutFailed) as error:
                if num_left and not flight.has_timed_out:
                    logger.warning("row %s is retried, at most %d more times: %s", row.uid, num_left, error)
                elif self._on_failure == "stop":
                    raise
                else:
                    return Dropped(row.uid, _kind_of(error, flight), str(error))
        raise AssertionError("the last attempt ends in a result or an error")

    async def _run_once(self, flight: Flight, engine_of: Callable[[int], EpisodeEngine]) -> Group | Dropped:
        """The group, or an error that names what failed."""
        prompt = flight.dispatch.draw.prompt
        try:
            return self._to_group(prompt, await self._run_episodes(flight, engine_of))
        except asyncio.CancelledError as error:
            if flight.has_timed_out:
                raise RolloutFailed(f"row {prompt.uid}: {_too_slow(flight)}") from error
            if _is_cancelled():
                raise
            raise RolloutFailed(f"{self._where(prompt)} awaited something that was cancelled") from error
        except Exception as error:
            raise self._named(prompt, error) from error

    def _named(self, prompt: Prompt, error: Exception) -> HeadwaterError:
        """Headwater's own errors are unchanged; any other error gets the name of the workflow and the row."""
        if isinstance(error, HeadwaterError):
            return error
        stops = self._on_failure == "stop"
        remedy = "; fix it, or set rollout.on_failure=drop to drop and count such rows" if stops else ""
        return RolloutFailed(f"{self._where(prompt)} raised {type(error).__name__}: {error}{remedy}")

    async def _run_episodes(self, flight: Flight, engine_of: Callable[[int], EpisodeEngine]) -> Sequence[object]:
        """What each episode returned, in order; the greedy episode is the last one."""
        draw, samples = flight.dispatch.draw, range(self._num_samples)
        inputs = [EpisodeInput(draw.prompt, sample, derive_key(draw.rng_key, sample)) for sample in samples]
        episodes = [(self._workflow, data) for data in inputs]
        if self._greedy is not None:
            episodes.append((self._greedy, EpisodeInput(draw.prompt, GREEDY, 0)))
        gathering = _Gathering(len(episodes))

        async def run(place: int, workflow: EpisodeRunner, data: EpisodeInput) -> None:
            try:
                gathering.take(place, await self._episode(workflow, flight, engine_of(data.sample), data))
            except BaseException as error:  # noqa: BLE001  it is raised where the group waits
                gathering.fail(error)

        create_task = asyncio.get_running_loop().create_task
        return await gathering.wait([create_task(run(place, *each)) for place, each in enumerate(episodes)])

    async def _episode(
        self, workflow: EpisodeRunner, flight: Flight, engine: EpisodeEngine, data: EpisodeInput
    ) -> object:
        state = flight.episodes[data.sample] = data.state
        state.rest("working")
        if flight.start is not None:
            state.begin_late = partial(flight.start.announce, flight, data.sample)
        try:
            made = await workflow.workflow.run(Episode(workflow.context, engine, data))
            result: object = self._checked(made, flight, data)
            state.rest("done")
        except Exception as error:
            if not self._allow_partial_groups or isinstance(error, RunError):
                raise
            result = _Lost(self._named(data.prompt, error))
            state.rest("failed")
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            # SystemExit and KeyboardInterrupt would silently end the thread that runs all episodes. Extensions in Rust
            # raise such errors too.
            raise RolloutFailed(f"{self._where(data.prompt)} raised {type(error).__name__}: {error}") from error
        finally:
            if flight.start is not None:
                flight.start.announce(flight, data.sample)
                state.begin_late = is_not_awaited  # so that the flight and its states do not refer to each other
        return result

    def _where(self, prompt: Prompt) -> str:
        return f"workflow {self._workflow.name} on row {prompt.uid}"

    def _accepted(self, group: Group | Dropped) -> Group | Dropped:
        if isinstance(group, Group):
            for kind, keeps in self._filters.items():
                if not keeps(group):
                    return Dropped(group.prompt.uid, kind, REASONS[kind])
        return group

    def _to_group(self, prompt: Prompt, results: Sequence[object]) -> Group | Dropped:
        if any(result is None for result in results):
            return Dropped(prompt.uid, DropKind.REJECTED, "rejected by the workflow")
        lost = [result for result in results if isinstance(result, _Lost)]
        samples = [*range(self._num_samples), *[GREEDY] * (self._greedy is not None)]
        pieces = {sample: result for sample, result in zip(samples, results, strict=True) if isinstance(result, list)}
        greedy = pieces.pop(GREEDY, None)
        if lost and (len(pieces) < _FEWEST_SAMPLES or (self._greedy is not None and greedy is None)):
            raise lost[0].error
        for each in lost:
            logger.warning("row %s continues without a sample: %s", prompt.uid, each.error)
        baseline = statistics.mean(each.reward for each in greedy) if greedy else None
        kept = tuple(itertools.chain.from_iterable(pieces.values()))
        return Group(prompt, kept, baseline, num_lost=len(lost))

    def _checked(self, result: object, flight: Flight, data: EpisodeInput) -> list[Trajectory] | None:
        """The trajectories of one episode; None if the workflow rejects it."""
        if result is None or (isinstance(result, list) and not result):
            return None
        pieces: list[Trajectory] = []
        for piece in result if isinstance(result, list) else [result]:
            if not isinstance(piece, Trajectory):
                raise InvalidTrajectory(
                    f"{self._where(data.prompt)} returned a {type(piece).__name__}; return a Trajectory, a list of "
                    "them, or None to reject the episode"
                )
            if (problem := self._problem(piece, flight, data)) is not None:
                raise InvalidTrajectory(f"{self._where(data.prompt)} returned {problem}")
            pieces.append(piece)
        return pieces

    def _problem(self, piece: Trajectory, flight: Flight, data: EpisodeInput) -> str | None:
        if piece.uid != data.prompt.uid:
            return f"a trajectory of row {piece.uid}; set uid to the uid of the episode's prompt"
        if piece.sample != data.sample:
            return (
                f"a trajectory of sample {piece.sample} for sample {data.sample}; groups are compared by sample, so "
                "set it to the episode's"
            )
        if self._limits is None:
            return None
        return self._limits.problem(piece, data.prompt, newest_seen=flight.newest_version)


@dataclass(frozen=True, slots=True)
class _Lost:
    """Takes the place of a sample that failed."""

    error: HeadwaterError


def _kind_of(error: RewardFailed | RolloutFailed, flight: Flight) -> DropKind:
    if flight.has_timed_out:
        return DropKind.TIMED_OUT
    if isinstance(error, RewardFailed):
        return DropKind.REWARD_TIMED_OUT if isinstance(error, RewardTimedOut) else DropKind.REWARD_FAILED
    if isinstance(error, AgentFailed):
        return DropKind.AGENT_TIMED_OUT if isinstance(error, AgentTimedOut) else DropKind.AGENT_FAILED
    if isinstance(error, InvalidTrajectory):
        return DropKind.INVALID
    is_engine = any(error is each for each in flight.engine_errors)
    return DropKind.ENGINE_FAILED if is_engine else DropKind.FAILED


def _is_cancelled() -> bool:
    """Whether this task itself was cancelled, as opposed to something that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _too_slow(flight: Flight) -> str:
    return (
        f"its episodes took longer than rollout.episode_timeout_s ({flight.seconds:.0f} s; {flight.doing()}); "
        "raise it, or find out what they are waiting for"
    )


class _Gathering:
    """Collects the results of concurrent tasks. Their caller is woken once: by the last result, or by the first error.

    Like ``asyncio.gather``, which has the event loop call a function at the end of every task.
    """

    def __init__(self, count: int) -> None:
        self._results: list[object] = [None] * count
        self._num_left = count
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, place: int, result: object) -> None:
        self._results[place] = result
        self._num_left -= 1
        if not self._num_left and not self._ended.done():
            self._ended.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    async def wait(self, tasks: Sequence[asyncio.Task[None]]) -> Sequence[object]:
        """Results in order. After the first error, the others are cancelled and awaited, so that none outlives this."""
        try:
            await self._ended
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return self._results
