"""The groups that run now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from headwater.rollout.flight import Dispatch, Flight

_WATCH_EVERY_S = 1.0


class Flights:
    """Flights by the id of their dispatch. Those that take longer than ``limit_s`` are called off.

    One look a second at all of them, not a timer for each: ten thousand flights are nothing special. Lives on the
    event loop; other threads may look at it, not change it.
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
        """For a status file: what has been running longest, and what it does."""
        flights = sorted(self, key=lambda flight: flight.started)
        return [
            {
                "id": flight.dispatch.id,
                "uid": flight.dispatch.draw.prompt.uid,
                "seconds": round(flight.seconds, 1),
                "doing": flight.doing(),
            }
            for flight in flights[:count]
        ]

    def describe(self) -> str:
        flights = tuple(self)
        if not flights:
            return "nothing runs"
        oldest = min(flights, key=lambda flight: flight.started)
        return (
            f"{len(flights)} run, the oldest for {oldest.seconds:.0f} s on row {oldest.dispatch.draw.prompt.uid} "
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
                    flight.task.cancel()  # again each second: an episode may swallow it
        if self._flying:
            self._look_later()
