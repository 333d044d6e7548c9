"""A group on its way: which episodes run, what they do, and under which policy versions their tokens were made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headwater.core.protocols import EpisodeEngine
from headwater.core.records import ModelRequest, ModelResponse
from headwater.rollout.group import PromptDraw
from headwater.rollout.segments import Segments, segments_of


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A prompt that was sent on its way. It ends exactly once: trained on, or dropped."""

    id: int
    draw: PromptDraw
    attempt: int = 0
    """How often the same draw was dropped as too old before."""


@dataclass(eq=False)
class Flight:
    """What is known of a dispatch while it runs."""

    dispatch: Dispatch
    version: int
    """The policy when it started: none of its tokens is older."""
    num_episodes: int
    started: float = field(default_factory=time.monotonic)
    num_done: int = 0
    num_generating: int = 0
    requests: dict[tuple[int, int], Segments] = field(default_factory=dict)
    """By (sample, number of the request within its episode)."""
    task: asyncio.Task[Any] | None = None
    has_timed_out: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def doing(self) -> str:
        """``5 of 8 episodes done, 2 generate, 1 waits for a reward or a tool``."""
        num_left = self.num_episodes - self.num_done
        waiting = num_left - self.num_generating
        parts = [f"{self.num_done} of {self.num_episodes} episodes done"]
        if self.num_generating:
            parts.append(f"{self.num_generating} generate" + ("s" if self.num_generating == 1 else ""))
        if waiting > 0:
            parts.append(f"{waiting} " + ("waits" if waiting == 1 else "wait") + " for a reward or a tool")
        return ", ".join(parts)


@dataclass(eq=False, slots=True)
class WatchedEngine:
    """The engine as one episode sees it: what it asks for is noted in its flight."""

    engine: EpisodeEngine
    flight: Flight
    sample: int
    num_requests: int = 0

    @classmethod
    def maker(cls, engine: EpisodeEngine, flight: Flight) -> Callable[[int], WatchedEngine]:
        """By the number of the sample."""
        return lambda sample: cls(engine, flight, sample)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        flight = self.flight
        flight.num_generating += 1
        try:
            response = await self.engine.agenerate(request)
        finally:
            flight.num_generating -= 1
        # Only those that were answered have a number: whether one fails may depend on how busy the engine is.
        flight.requests[self.sample, self.num_requests] = segments_of(response.output_versions)
        self.num_requests += 1
        return response
