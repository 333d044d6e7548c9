"""Keeps the calls of several threads to the same ranks apart, and knows what the ranks are doing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from headwater.core.errors import RankFailed, WaitTimeout
from headwater.core.learner import RankStatus
from headwater.core.waits import wait_until

_TURN_LIMIT_S = 60.0
"""How long a call waits for an export that another thread has not read to its end."""


_UNTOLD = "status"
"""Follows every call that changes something, and would hide it."""


@dataclass(frozen=True)
class EndedRank:
    """A rank whose process is no longer there."""

    cause: str
    """What is known about it."""
    alive_at: float
    """When it was last known to run, in seconds since the epoch."""

    @classmethod
    def noticed(cls, cause: str, alive_at: float) -> EndedRank:
        """A rank whose end is noticed now."""
        return cls(f"{cause}, noticed at most {max(0.0, time.time() - alive_at):.1f} s later", alive_at)


@dataclass(frozen=True)
class Activity:
    """What the ranks are doing."""

    call: str = ""
    """The call that they execute; empty if they wait for one."""
    seconds: float = 0.0
    """Since it began."""
    last_call: str = ""
    """The last call that has ended, and its duration."""
    answered: Collection[int] = ()
    """The ranks that have completed the present call, if that is known."""
    ended: Mapping[int, EndedRank] = field(default_factory=dict)
    """The ranks that have ended."""

    def of(self, rank: RankStatus) -> RankStatus:
        if (gone := self.ended.get(rank.rank)) is not None:
            state = f"ended: {gone.cause}"
        elif not self.call:
            state = "idle"
        elif rank.rank in self.answered:
            state = f"has completed {self.call} and waits for the others"
        else:
            state = f"executes {self.call} for {self.seconds:.0f} s"
        alive_at = None if gone is None else gone.alive_at
        return replace(rank, state=state, last_call=self.last_call, is_alive=gone is None, alive_at=alive_at)


class Turns:
    """One call at a time: the messages of one call must not come between those of another one.

    A call waits while another thread reads an export. It is refused if that does not end, because then nothing reads
    the export any more.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        """``check`` raises once the ranks cannot be called any more."""
        self._check = check
        self._condition = threading.Condition()
        self._current: tuple[object, str] | None = None
        """Whose turn it is, and the name of the call."""
        self._began = 0.0
        self._last = ""

    def activity(self) -> Activity:
        """What the ranks are doing, asked from any thread. ``answered`` and ``ended`` are not known here."""
        with self._condition:
            name = self._current[1] if self._current is not None else ""
            return Activity(name, time.monotonic() - self._began if name else 0.0, self._last)

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        mine = (object(), name)

        def is_free() -> bool:
            self._check()
            return self._current is None

        try:
            with self._condition:
                wait_until(
                    self._condition,
                    is_free,
                    lambda: f"{name} waits until {self._doing} has ended",
                    kind="ranks",
                    hard_limit_s=_TURN_LIMIT_S,
                )
                self._current, self._began = mine, time.monotonic()
            yield
            if name != _UNTOLD:
                self._last = f"{name}, {time.monotonic() - self._began:.1f} s"
        except WaitTimeout as error:
            if self._current is mine:
                raise
            raise RankFailed(
                f"{name}: the ranks still execute {self._doing}, which has not been read to its end"
            ) from error
        finally:
            with self._condition:
                if self._current is mine:
                    self._current = None
                    self._condition.notify_all()

    @property
    def _doing(self) -> str:
        current = self._current
        return current[1] if current is not None else "nothing"
