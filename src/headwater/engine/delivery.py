"""Bringing what the engine's thread has finished to the threads and event loops that wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from headwater.core.errors import LogitsBroken, RolloutFailed, WaitTimeout
from headwater.core.records import ModelResponse
from headwater.core.waits import wait_for_future
from headwater.engine.sequence import Sequence

_CONTROL_LIMIT_S = 600.0
_STALL_LIMIT_S = 600.0
_LOOK_S = 1.0


def wait_for(done: Future[None], name: str) -> None:
    """Wait until the engine's thread has done what was asked; give up on it, and call it off, after ten minutes."""
    try:
        wait_for_future(done, lambda: f"{name} in the engine", kind="engine_call", hard_limit_s=_CONTROL_LIMIT_S)
    except WaitTimeout as error:
        if done.cancel():
            state = "waited for running requests and is called off; abort the requests, or use another update mode"
        elif done.done():
            return done.result()  # it was done at the last moment
        else:
            state = "has begun and does not come to an end; the device may hang: end the process"
        raise WaitTimeout(f"gave up after {_CONTROL_LIMIT_S:.0f} s: {name} {state}") from error


class Gathering:
    """Responses to a list of requests. The caller is woken once, by the last of them, and not by each."""

    def __init__(self, num_requests: int) -> None:
        self._ended: list[Sequence | None] = [None] * num_requests
        self._num_left = num_requests
        self._all_ended = threading.Event()
        if not num_requests:
            self._all_ended.set()

    def take(self, place: int, ended: Sequence) -> None:
        self._ended[place] = ended
        self._num_left -= 1  # only the engine's thread counts
        if not self._num_left:
            self._all_ended.set()

    def wait(self, progress: Callable[[], object]) -> list[ModelResponse]:
        """Wait for the last one. However long that takes is fine, but not ten minutes in which nothing happens.

        ``progress`` is asked now and then and answers differently while the engine works. ``None`` stands for an engine
        that is paused or asleep: until somebody ends that, the wait has no limit.
        """
        seen, since = progress(), time.monotonic()
        while not self._all_ended.wait(_LOOK_S):
            now = progress()
            if now is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL_LIMIT_S:
                raise WaitTimeout(
                    f"gave up on {self._num_left} of {len(self._ended)} requests: the engine has computed nothing for "
                    f"{_STALL_LIMIT_S:.0f} s; the device may hang: end the process"
                )
        return [result_of(ended) for ended in self._ended if ended is not None]


class Mailbox:
    """Things to do on an event loop, posted from another thread: many of them wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._actions: list[Callable[[], object]] = []

    def post(self, action: Callable[[], object]) -> None:
        with self._lock:
            self._actions.append(action)
            is_first = len(self._actions) == 1
        # Whoever empties the box takes everything that is in it, so only the first one has to ring.
        if is_first:
            with suppress(RuntimeError):  # a loop that is closed has nobody waiting
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        with self._lock:
            actions, self._actions = self._actions, []
        for action in actions:
            try:
                action()
            except Exception as error:  # noqa: BLE001  the others are for somebody else; the loop's owner hears of it
                self._loop.call_exception_handler(
                    {"message": "what the engine has finished could not be handed over", "exception": error}
                )


class Mailboxes:
    """One mailbox per event loop that asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_loop: dict[asyncio.AbstractEventLoop, Mailbox] = {}

    def of_running_loop(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._of_loop:
                for closed in [each for each in self._of_loop if each.is_closed()]:
                    del self._of_loop[closed]
                self._of_loop[loop] = Mailbox(loop)
            return self._of_loop[loop]


def settle(answer: asyncio.Future[ModelResponse], ended: Sequence) -> None:
    """Answer a caller, unless it has gone."""
    if answer.done():
        return
    try:
        answer.set_result(result_of(ended))
    except RolloutFailed as failure:
        answer.set_exception(failure)


def result_of(ended: Sequence) -> ModelResponse:
    if ended.error is not None:
        raise failure_of(ended)
    return ended.response()


def failure_of(ended: Sequence) -> RolloutFailed:
    name = f"request {ended.request.request_id}"
    if isinstance(ended.error, LogitsBroken):
        return LogitsBroken(f"{name}: {ended.error}")
    failure = RolloutFailed(f"{name}: the engine failed: {type(ended.error).__name__}: {ended.error}")
    failure.__cause__ = ended.error
    return failure
