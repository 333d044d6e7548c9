"""Groups that run: what each one is doing, and which policy versions produced its tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from headwater.core.errors import RolloutFailed
from headwater.core.protocols import EpisodeEngine, EpisodeStage, EpisodeState, delta_listener, generate_aloud
from headwater.core.requests import ModelRequest, ModelResponse
from headwater.rollout.group import GroupTimes, PromptDraw
from headwater.rollout.joint import GENERATING, JointStart, JointTurns

logger = logging.getLogger(__name__)

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
    clock: Callable[[], float] = time.monotonic
    """The seconds of the event loop on which the group runs."""
    started: float = field(init=False)
    episodes: dict[int, EpisodeState] = field(default_factory=dict)
    """What each episode is doing, by its sample. Episodes that have not started are missing."""
    requests: dict[tuple[int, int], VersionRuns] = field(default_factory=dict)
    """See ``Requests``."""
    queue_s: list[float] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)
    """Per answered request, as the engine measured it."""
    task: asyncio.Task[Any] | None = None
    has_timed_out: bool = False
    engine_errors: list[RolloutFailed] = field(default_factory=list)
    """The errors that the engine raised for the episodes."""
    start: JointStart | None = None
    """In waves: the groups with which this one starts."""
    _newest: int | None = None

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def seconds(self) -> float:
        return self.clock() - self.started

    @property
    def times(self) -> GroupTimes:
        episodes = tuple(each.seconds for each in self.episodes.values() if each.stage == "done")
        return GroupTimes(self.seconds, tuple(self.queue_s), tuple(self.generate_s), episodes)

    @property
    def newest_version(self) -> int:
        """The newest policy version that the engine has reported to this group."""
        return self.version if self._newest is None else self._newest

    def answered(self, sample: int, number: int, runs: VersionRuns) -> None:
        """The engine has answered a request of an episode, with tokens of these versions."""
        self.requests[sample, number] = runs
        for version, _ in runs:
            self._newest = version if self._newest is None else max(self._newest, version)

    @property
    def num_done(self) -> int:
        """Episodes that have ended, also those that failed."""
        stages = self.stages()
        return stages["done"] + stages["failed"]

    def stages(self) -> Counter[EpisodeStage]:
        """How many episodes are in each stage."""
        counts = Counter(each.stage for each in tuple(self.episodes.values()))
        counts["pending"] += self.num_episodes - counts.total()
        return +counts

    def doing(self) -> str:
        """For example ``5 of 8 episodes done, 2 generating, 1 calling search for 12 s``."""
        longest: dict[str, float] = {}
        counts: Counter[str] = Counter()
        now = [each.now() for each in tuple(self.episodes.values())]
        for stage, what, seconds in now:
            words = what or _STAGES[stage]
            counts[words] += 1
            longest[words] = max(longest.get(words, 0.0), seconds)
        counts[_STAGES["pending"]] += self.num_episodes - len(now)
        num_done = counts.pop(_STAGES["done"], 0)
        parts = [f"{num_done} of {self.num_episodes} episodes done"]
        for words, count in counts.items():
            is_known = words == GENERATING or longest.get(words, 0.0) < _NOTABLE_S
            if count:
                parts.append(f"{count} {words}" + ("" if is_known else f" for {longest[words]:.0f} s"))
        return ", ".join(parts)


_WAITING = "waiting to start with the others"
_NOTABLE_S = 1.0
_STAGES: dict[EpisodeStage, str] = {
    "pending": "not started",
    "generating": GENERATING,
    "calling_tools": "calling tools",
    "reading_media": "reading images or videos",
    "scoring": "scoring",
    "working": "waiting for a reward or a tool",
    "done": "done",
    "failed": "failed",
}
"""The stages in words, for episodes whose activity has no name."""


@dataclass(eq=False, slots=True)
class WatchedEngine:
    """The engine as one episode sees it. It records the episode's requests in the flight."""

    engine: EpisodeEngine
    turns: JointTurns | None
    flight: Flight
    sample: int
    num_requests: int = 0

    @classmethod
    def maker(cls, engine: EpisodeEngine, turns: JointTurns | None, flight: Flight) -> Callable[[int], WatchedEngine]:
        """A function from the number of a sample to its engine. ``turns`` is shared by all episodes of ``engine``."""
        return lambda sample: cls(engine, turns, flight, sample)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        flight = self.flight
        state, start = flight.episodes[self.sample], flight.start
        try:
            if start is not None and start.takes_requests and delta_listener.get() is None:
                with state.doing(_WAITING, "pending") as activity:
                    response = await start.answer(flight, self.sample, request, activity)
            else:
                if start is not None and not start.is_open:
                    with state.doing(_WAITING, "pending"):
                        await start.enter(flight, self.sample)
                with state.doing(GENERATING, "generating"):
                    response = await self._generate(request)
        except RolloutFailed as error:
            flight.engine_errors.append(error)
            raise
        # Only answered requests are numbered: whether a request fails may depend on how busy the engine is.
        flight.answered(self.sample, self.num_requests, version_runs(response.output_versions))
        self.num_requests += 1
        flight.queue_s.append(response.queue_s)
        flight.generate_s.append(response.generate_s)
        return response

    def _generate(self, request: ModelRequest) -> Awaitable[ModelResponse]:
        if self.turns is not None and delta_listener.get() is None and self.turns.takes_requests:
            return self.turns.agenerate(request)
        generating, flight = generate_aloud(self.engine, request), self.flight
        if flight.start is None:
            return generating
        return _Begun(generating, partial(flight.start.entered, flight, self.sample))


class _Begun(Generator[Any, Any, ModelResponse]):
    """Awaits ``work``, and calls ``on_begun`` when it first waits or ends. The engine has the request then."""

    def __init__(self, work: Coroutine[Any, Any, ModelResponse], on_begun: Callable[[], None]) -> None:
        self._work = work
        self._on_begun = on_begun

    def __await__(self) -> Generator[Any, Any, ModelResponse]:
        return self

    def send(self, value: Any) -> Any:
        try:
            return self._work.send(value)
        finally:
            self._on_begun()

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)


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
        flight.start = None  # it knows its flights: without this, only garbage collection could free them

    def dispatches(self) -> list[Dispatch]:
        return [flight.dispatch for flight in self]

    def oldest(self, count: int) -> list[dict[str, Any]]:
        """The groups that have run longest, for the status file."""
        flights = sorted(self, key=lambda flight: flight.started)
        return [
            {
                "id": flight.dispatch.id,
                "uid": flight.dispatch.draw.uid,
                "seconds": round(flight.seconds, 1),
                "stages": dict(flight.stages()),
                "doing": flight.doing(),
            }
            for flight in flights[:count]
        ]

    def stages(self) -> dict[EpisodeStage, int]:
        """How many episodes of all running groups are in each stage."""
        return dict(sum((flight.stages() for flight in self), Counter()))

    def describe(self) -> str:
        flights = tuple(self)
        if not flights:
            return "no group is running"
        oldest = min(flights, key=lambda flight: flight.started)
        return (
            f"{len(flights)} running, the oldest for {oldest.seconds:.0f} s on row {oldest.dispatch.draw.uid} "
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
