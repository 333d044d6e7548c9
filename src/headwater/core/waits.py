"""Waiting with a name and two limits: one at which the wait speaks, one at which it ends.

A run's threads wait for one another through here whenever that may take longer than half a minute, so that a run that
stands still says what it stands at. Two waits are not of this kind: what an episode waits for has the episode's limits,
and ``Engine.generate``, which no run calls, looks whether the engine makes progress. While a wait lasts it is on a
board that other threads can read:

    group = wait_until(condition, take_group, describe, kind="batch", hard_limit_s=1800)
    ...
    for each in open_waits():
        print(each.kind, each.seconds, each.description)

A description is asked anew each time it is shown, and by other threads too: it may read what is being waited for, but
must not block.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from headwater.core.errors import WaitTimeout

logger = logging.getLogger(__name__)
T = TypeVar("T")

ENGINE_START_LIMIT_S = 1800.0
"""Until an engine's process serves. Loading a large model from a slow disk takes its time."""
ENGINE_CALL_LIMIT_S = ENGINE_START_LIMIT_S + 3 * 600.0
"""Until an engine has done what it was asked for, whoever waits. Its process may die at the end of a call, another may
start, take the newest weights and be called again; the engine's own limit is ten minutes for each of these calls."""

_LOOK_S = 1.0
"""Longest time a thread waits in one go: some systems deliver Ctrl-C only between two waits."""

_LONGEST_S = 3600.0
"""Longest time an event loop waits in one go: an infinite limit is no time of a clock."""


@dataclass(frozen=True)
class OpenWait:
    """A wait that goes on, as it stood when it was read."""

    kind: str
    """Short key, such as "batch" or "weights"; what usually helps is looked up by it."""
    description: str
    seconds: float
    """Since it began."""
    hard_limit_s: float
    """When it gives up; infinity for a wait that may last."""
    thread_name: str


def open_waits() -> tuple[OpenWait, ...]:
    """All waits of this process that go on now, the longest first."""
    with _board_lock:
        waits = list(_board.values())  # in the order they began
    return tuple(wait.read() for wait in waits)


async def named_wait(
    awaitable: Awaitable[T],
    describe: Callable[[], str],
    *,
    hard_limit_s: float,
    soft_limit_s: float = 30.0,
    kind: str = "other",
) -> T:
    """Wait for ``awaitable``; log it every ``soft_limit_s``; at ``hard_limit_s`` cancel it, raise ``WaitTimeout``."""
    task = asyncio.ensure_future(awaitable)
    try:
        with _Wait(kind, describe, hard_limit_s, soft_limit_s) as wait:
            while True:
                done, _ = await asyncio.wait({task}, timeout=wait.until_next_s())
                if done:
                    return task.result()
                wait.speak_or_end()
    finally:
        task.cancel()


def wait_until(
    condition: threading.Condition,
    predicate: Callable[[], T],
    describe: Callable[[], str],
    *,
    kind: str,
    hard_limit_s: float,
    soft_limit_s: float = 30.0,
) -> T:
    """Wait until ``predicate`` answers something true, and return that. The caller holds ``condition``.

    The predicate is asked after every notification, and once a second besides, so it may also watch what notifies
    nobody, and may raise to end the wait.
    """
    if answer := predicate():
        return answer
    with _Wait(kind, describe, hard_limit_s, soft_limit_s) as wait:
        while True:
            condition.wait(min(_LOOK_S, wait.until_next_s()))
            if answer := predicate():
                return answer
            wait.speak_or_end()


def wait_for_future(
    future: Future[T],
    describe: Callable[[], str],
    *,
    kind: str,
    hard_limit_s: float,
    soft_limit_s: float = 30.0,
) -> T:
    """Wait for what another thread does. At ``hard_limit_s`` the future stays as it is: its owner may call it off."""
    if future.done():
        return future.result()
    with _Wait(kind, describe, hard_limit_s, soft_limit_s) as wait:
        while True:
            try:
                return future.result(min(_LOOK_S, wait.until_next_s()))
            except TimeoutError:
                if future.done():  # the work itself may have raised a TimeoutError
                    return future.result()
            wait.speak_or_end()


_board_lock = threading.Lock()
_board: dict[int, _Wait] = {}
_numbers = itertools.count()


class _Wait:
    """One wait: on the board while it lasts, with its clock."""

    def __init__(self, kind: str, describe: Callable[[], str], hard_limit_s: float, soft_limit_s: float) -> None:
        if soft_limit_s <= 0:
            raise ValueError(f"soft_limit_s = {soft_limit_s}: must be > 0; use math.inf for a wait that never speaks")
        self._kind = kind
        self._describe = describe
        self._hard_limit_s = hard_limit_s
        self._soft_limit_s = soft_limit_s
        self._thread_name = threading.current_thread().name
        self._number = next(_numbers)
        self._began = time.monotonic()
        self._speaks_at_s = soft_limit_s

    def __enter__(self) -> _Wait:
        with _board_lock:
            _board[self._number] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _board_lock:
            del _board[self._number]

    def until_next_s(self) -> float:
        """Seconds until there is something to say."""
        return min(_LONGEST_S, max(0.0, min(self._speaks_at_s, self._hard_limit_s) - self._waited_s()))

    def speak_or_end(self) -> None:
        """Log at the soft limits, raise at the hard one; nothing between."""
        waited_s = self._waited_s()
        if waited_s >= self._hard_limit_s:
            raise WaitTimeout(f"gave up after {waited_s:.0f} s: {self._description()}")
        if waited_s >= self._speaks_at_s:
            logger.warning("still waiting after %.0f s: %s", waited_s, self._description())
            self._speaks_at_s = waited_s + self._soft_limit_s

    def read(self) -> OpenWait:
        return OpenWait(self._kind, self._description(), self._waited_s(), self._hard_limit_s, self._thread_name)

    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    def _description(self) -> str:
        try:
            return self._describe()
        except Exception as error:  # noqa: BLE001  what is described changes under the reader; the wait matters more
            return f"{self._kind} (cannot be described now: {type(error).__name__}: {error})"
