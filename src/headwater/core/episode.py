"""One episode to run, and what it is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from headwater.core.prompt import Prompt

EpisodeStage = Literal["pending", "generating", "calling_tools", "scoring", "working", "done", "failed"]
"""``pending`` before an episode does anything; ``working`` while it does something that it has no name for."""


class EpisodeState:
    """What one episode is doing now. The status file and the doctor show it.

        with state.doing("calling search", "calling_tools"):
            result = await search(query)

    Several activities may be open at the same time; the newest is shown. Only the event loop's thread changes this
    object, and other threads may read it.
    """

    def __init__(self) -> None:
        self._rest: EpisodeStage = "pending"
        self._open: list[tuple[EpisodeStage, str, float]] = []
        """Each open activity, and when it began."""
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}
        """Time by kind of work: ``generating``, ``calling_tools`` and so on, and, once it has ended, ``total``."""
        self.begin_late: Callable[[], None] = lambda: None
        """Called by an episode that cannot send its first request soon, so that others do not wait for it."""

    def doing(self, what: str, stage: EpisodeStage = "working") -> AbstractContextManager[None]:
        """State what happens inside this block."""
        return _Doing(self, what, stage)

    def rest(self, stage: EpisodeStage) -> None:
        """The stage while no activity is open."""
        self._rest = stage
        if stage == "done":
            self.seconds["total"] = time.monotonic() - self._began

    @property
    def stage(self) -> EpisodeStage:
        return self.now()[0]

    def now(self) -> tuple[EpisodeStage, str, float]:
        """The stage, the activity in words (empty if it has no name), and its seconds so far."""
        newest = self._open[-1:]  # a copy, because another thread may end the activity meanwhile
        if not newest:
            return self._rest, "", 0.0
        stage, what, began = newest[0]
        return stage, what, time.monotonic() - began


class _Doing:
    """An activity. A class, because thousands of short episodes enter several of these blocks each."""

    __slots__ = ("_activity", "_stage", "_state", "_what")

    def __init__(self, state: EpisodeState, what: str, stage: EpisodeStage) -> None:
        self._state = state
        self._what = what
        self._stage = stage

    def __enter__(self) -> None:
        self._activity = (self._stage, self._what, time.monotonic())
        self._state._open.append(self._activity)

    def __exit__(self, *_: object) -> None:
        state, stage = self._state, self._stage
        state._open.remove(self._activity)
        state.seconds[stage] = state.seconds.get(stage, 0.0) + time.monotonic() - self._activity[2]


@dataclass(frozen=True, slots=True)
class EpisodeInput:
    """One episode to run."""

    prompt: Prompt
    sample: int
    """Number of the episode within its group."""
    rng_key: int
    """All randomness of the episode is derived from this key."""
    state: EpisodeState = field(default_factory=EpisodeState, compare=False, repr=False)
    """What the episode is doing, for the doctor."""
