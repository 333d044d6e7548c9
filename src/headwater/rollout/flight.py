"""Groups that run: what each one is doing, and which policy versions produced its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from headwater.core.errors import RolloutFailed
from headwater.core.protocols import EpisodeEngine
from headwater.core.records import ModelRequest, ModelResponse
from headwater.rollout.group import PromptDraw

_WATCH_EVERY_S = 1.0

VersionRuns = tuple[tuple[int, int], ...]
"""The policy versions of a response: ``(version, number of tokens)``, in the order of the tokens."""

Requests = Mapping[tuple[int, int], VersionRuns]
"""The version runs of a group, by (sample, number of the request within its episode)."""


def version_runs(versions: tuple[int, ...]) -> VersionRuns:
    if versions and versions.count(versions[0]) == len(versions):  # the common case, without a loop over the tokens
        return ((versions[0], len(versions)),)
    return tuple((version, len(list(run))) for version, run in groupby(versions))


def requests_to_json(requests: Requests) -> list[list[Any]]:
    return [[*place, [list(each) for each in runs]] for place, runs in sorted(requests.items())]


def requests_from_json(read: Iterable[Any]) -> dict[tuple[int, int], VersionRuns]:
    return {(sample, number): tuple((version, count) for version, count in runs) for sample, number, runs in read}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A prompt that was given out to run. It ends exactly once: trained on, or dropped."""

    id: int
    draw: PromptDraw
    attempt: int = 0
    """How often the same draw was dropped as too old before."""


@dataclass(eq=False)
class Flight:
    """The state of a dispatch while it runs."""

    dispatch: Dispatch
    version: int
    """The policy version when the group started. None of its tokens is older."""
    num_episodes: int
    started: float = field(default_factory=time.monotonic)
    num_done: int = 0
    num_generating: int = 0
    requests: dict[tuple[int, int], VersionRuns] = field(default_factory=dict)
    """See ``Requests``."""
    task: asyncio.Task[Any] | None = None
    has_timed_out: bool = False
    engine_errors: list[RolloutFailed] = field(default_factory=list)
    """The errors that the engine raised for the episodes."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def newest_version(self) -> int:
        """The newest policy version that the engine has reported to this group."""
        reported = (version for runs in self.requests.values() for version, _ in runs)
        return max(reported, default=self.version)

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for something other than the engine, such as a reward or a tool."""
        return self.num_episodes - self.num_done - self.num_generating

    def doing(self) -> str:
        """For example ``5 of 8 episodes done, 2 generating, 1 waiting for a reward or a tool``."""
        parts = [f"{self.num_done} of {self.num_episodes} episodes done"]
        if self.num_generating:
            parts.append(f"{self.num_generating} generating")
        if self.num_waiting > 0:
            parts.append(f"{self.num_waiting} waiting for a reward or a tool")
        return ", ".join(parts)


@dataclass(eq=False, slots=True)
class WatchedEngine:
    """The engine as one episode sees it. It records the episode's requests in the flight."""

    engine: EpisodeEngine
    flight: Flight
    sample: int
    num_requests: int = 0

    @classmethod
    def maker(cls, engine: EpisodeEngine, flight: Flight) -> Callable[[int], WatchedEngine]:
        """A function from the number of a sample to its engine."""
        return lambda sample: cls(engine, flight, sample)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        flight = self.flight
        flight.num_generating += 1
        try:
            response = await self.engine.agenerate(request)
        except RolloutFailed as error:
            flight.engine_errors.append(error)
            raise
        finally:
            flight.num_generating -= 1
        # Only answered requests are numbered: whether a request fails may depend on how busy the engine is.
        flight.requests[self.sample, self.num_requests] = version_runs(response.output_versions)
        self.num_requests += 1
        return response


class Flights:
    """The groups that run now, by the id of their dispatch. A group that runs longer than ``limit_s`` is cancelled.

    One timer checks all flights every second; there is no timer per flight. Only the event loop's thread may change
    this object. Other threads may read it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._flying: dict[int, Flight] = {}
        self._watch: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._flying.values()))

    def begin(self, flight: Flight) -> None:
        self._flying[flight.dispatch.id] = flight
        self._look_later()

    def end(self, flight: Flight) -> None:
        del self._flying[flight.dispatch.id]

    def dispatches(self) -> list[Dispatch]:
        return [flight.dispatch for flight in self]

    def oldest(self, count: int) -> list[dict[str, Any]]:
        """The groups that have run longest, for the status file."""
        flights = sorted(self, key=lambda flight: flight.started)
        return [
            {
                "id": flight.dispatch.id,
                "uid": flight.dispatch.draw.prompt.uid,
                "seconds": round(flight.seconds, 1),
                "num_generating": flight.num_generating,
                "num_waiting": flight.num_waiting,
                "doing": flight.doing(),
            }
            for flight in flights[:count]
        ]

    def describe(self) -> str:
        flights = tuple(self)
        if not flights:
            return "no group is running"
        oldest = min(flights, key=lambda flight: flight.started)
        return (
            f"{len(flights)} running, the oldest for {oldest.seconds:.0f} s on row {oldest.dispatch.draw.prompt.uid} "
            f"({oldest.doing()})"
        )

    def _look_later(self) -> None:
        if self._watch is None:
            self._watch = self._loop.call_later(_WATCH_EVERY_S, self._end_slow)

    def _end_slow(self) -> None:
        self._watch = None
        for flight in self:
            if flight.seconds > self._limit_s:
                flight.has_timed_out = True
                if flight.task is not None:
                    flight.task.cancel()  # repeated every second, because an episode may suppress a cancellation
        if self._flying:
            self._look_later()
