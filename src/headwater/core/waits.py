"""Named waits with two limits: a soft limit at which the wait is logged, and a hard limit at which it raises.

Every wait between threads that may take longer than half a minute uses this module, so that a stalled run says what it
waits for. The only exception is an episode, which has its own limits. Other threads can list the open waits:

    group = wait_until(condition, take_group, describe, kind="batch", hard_limit_s=1800)
    ...
    for each in open_waits():
        print(each.kind, each.seconds, each.description)

The description is computed each time it is shown, possibly by another thread. It may read the state that is waited
for, but it must not block.
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

COLLECTIVE_LIMIT_S = 1800.0
"""Limit for one collective operation of learner ranks, and for the wait until all of them have joined."""
ENGINE_START_LIMIT_S = 1800.0
"""Limit for starting an engine process. Loading a large model from a slow disk takes long."""
ENGINE_CALL_LIMIT_S = ENGINE_START_LIMIT_S + 3 * 600.0
"""Limit for one call to an engine. Its process may die during the call; another one then starts, takes the newest
weights and is called again. The engine limits each of these calls to ten minutes."""

_LOOK_S = 1.0
"""Longest uninterrupted wait of a thread: some systems deliver Ctrl-C only between two waits."""

_LONGEST_S = 3600.0
"""Longest uninterrupted wait of an event loop, which cannot wait for an infinite time."""


@dataclass(frozen=True)
class OpenWait:
    """A snapshot of a wait that has not ended."""

    kind: str
    """Short key, such as "batch" or "weights", by which the doctor looks up its advice."""
    description: str
    seconds: float
    """Time since the wait began."""
    hard_limit_s: float
    """Time after which the wait raises; infinity if it may last."""
    thread_name: str


def open_waits() -> tuple[OpenWait, ...]:
    """Return the open waits of this process, the longest first."""
    with _open_waits_lock:
        waits = list(_open_waits.values())  # in the order they began
    return tuple(wait.read() for wait in waits)


async def named_wait(
    awaitable: Awaitable[T],
    describe: Callable[[], str],
    *,
    hard_limit_s: float,
    soft_limit_s: float = 30.0,
    kind: str = "other",
) -> T:
    """Wait for ``awaitable`` and log every ``soft_limit_s``; at ``hard_limit_s`` cancel it and raise."""
    task = asyncio.ensure_future(awaitable)
    try:
        with _Wait(kind, describe, hard_limit_s, soft_limit_s) as wait:
            while True:
                done, _ = await asyncio.wait({task}, timeout=wait.until_next_s())
                if done:
                    return task.result()
                wait.log_or_raise()
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
    while_waiting: Callable[[], object] | None = None,
) -> T:
    """Wait until ``predicate`` returns a true value, and return that value. The caller holds ``condition``.

    The predicate is called after every notification and once a second, so it may also check state that sends no
    notifications. It may raise to end the wait. ``while_waiting`` is called about once a second, without the lock.
    """
    if answer := predicate():
        return answer
    with _Wait(kind, describe, hard_limit_s, soft_limit_s) as wait:
        while True:
            condition.wait(min(_LOOK_S, wait.until_next_s()))
            if answer := predicate():
                return answer
            wait.log_or_raise()
            if while_waiting is not None and wait.is_time_to_look():
                condition.release()
                try:
                    while_waiting()
                finally:
                    condition.acquire()
                if answer := predicate():
                    return answer


def wait_for_future(
    future: Future[T],
    describe: Callable[[], str],
    *,
    kind: str,
    hard_limit_s: float,
    soft_limit_s: float = 30.0,
    while_waiting: Callable[[], object] | None = None,
) -> T:
    """Wait for a future of another thread. The hard limit does not cancel the future; its owner may do so.

    ``while_waiting`` is called about once a second.
    """
    if future.done():
        return future.result()
    with _Wait(kind, describe, hard_limit_s, soft_limit_s) as wait:
        while True:
            try:
                return future.result(min(_LOOK_S, wait.until_next_s()))
            except TimeoutError:
                if future.done():  # the work itself may have raised a TimeoutError
                    return future.result()
            wait.log_or_raise()
            if while_waiting is not None and wait.is_time_to_look():
                while_waiting()


def start_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run a call that may block in its own thread. Other calls and the end of the process do not wait for it."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # it starts now, so it cannot be cancelled

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  the error belongs to the one who waits for the future
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def poll(
    predicate: Callable[[], bool],
    describe: Callable[[], str],
    *,
    kind: str,
    every_s: float,
    hard_limit_s: float,
    soft_limit_s: float = 30.0,
) -> None:
    """Wait until ``predicate`` is true, for state that sends no notifications, such as a file. It may raise."""
    if predicate():
        return
    with _Wait(kind, describe, hard_limit_s, soft_limit_s) as wait:
        while True:
            time.sleep(min(every_s, wait.until_next_s()))
            if predicate():
                return
            wait.log_or_raise()


_open_waits_lock = threading.Lock()
_open_waits: dict[int, _Wait] = {}
_numbers = itertools.count()


class _Wait:
    """One open wait and its clock."""

    def __init__(self, kind: str, describe: Callable[[], str], hard_limit_s: float, soft_limit_s: float) -> None:
        if soft_limit_s <= 0:
            raise ValueError(
                f"soft_limit_s = {soft_limit_s}: must be > 0; use math.inf for a wait that is never logged"
            )
        self._kind = kind
        self._describe = describe
        self._hard_limit_s = hard_limit_s
        self._soft_limit_s = soft_limit_s
        self._thread_name = threading.current_thread().name
        self._number = next(_numbers)
        self._began = time.monotonic()
        self._looks_at_s = _LOOK_S
        self._log_at_s = soft_limit_s

    def __enter__(self) -> _Wait:
        with _open_waits_lock:
            _open_waits[self._number] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _open_waits_lock:
            del _open_waits[self._number]

    def until_next_s(self) -> float:
        """Return the seconds until the next limit."""
        return min(_LONGEST_S, max(0.0, min(self._log_at_s, self._hard_limit_s) - self._waited_s()))

    def is_time_to_look(self) -> bool:
        """True at most once a second."""
        waited_s = self._waited_s()
        if waited_s < self._looks_at_s:
            return False
        self._looks_at_s = waited_s + _LOOK_S
        return True

    def log_or_raise(self) -> None:
        """Log at the soft limits and raise at the hard limit."""
        waited_s = self._waited_s()
        if waited_s >= self._hard_limit_s:
            raise WaitTimeout(f"gave up after {waited_s:.0f} s: {self._description()}")
        if waited_s >= self._log_at_s:
            logger.warning("still waiting after %.0f s: %s", waited_s, self._description())
            self._log_at_s = waited_s + self._soft_limit_s

    def read(self) -> OpenWait:
        return OpenWait(self._kind, self._description(), self._waited_s(), self._hard_limit_s, self._thread_name)

    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    def _description(self) -> str:
        try:
            return self._describe()
        except Exception as error:  # noqa: BLE001  the state may change while it is read; the wait matters more
            return f"{self._kind} (description failed: {type(error).__name__}: {error})"
