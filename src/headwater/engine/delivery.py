"""How other threads talk to the engine's thread: commands go in, and results come back to threads and event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import HeadwaterError, LogitsBroken, RequestError, RolloutFailed, WaitTimeout
from headwater.core.requests import ModelResponse
from headwater.core.waits import wait_for_future, wait_until
from headwater.engine.sequence import EngineSequence

_CONTROL_LIMIT_S = 600.0
_STALL_LIMIT_S = 600.0
_GENERATE_LIMIT_S = 7 * 24 * 3600.0
"""For a whole list of requests. It also limits the time in which the engine is paused or asleep."""


@dataclass(frozen=True)
class EngineOrder:
    """An action for the engine's thread, and the future of the caller that requested it."""

    action: Callable[[], None]
    after_drain: bool = False
    keeps_order: bool = False
    """Whether it waits until earlier commands that wait for a drain have run."""
    done: Future[None] = field(default_factory=Future)

    @property
    def is_called_off(self) -> bool:
        return self.done.cancelled()

    def carry_out(self) -> None:
        """Run the action. A ``HeadwaterError`` is a refusal and concerns only the caller.

        Any other error is also raised in the loop and ends the engine, because the action may have left its work
        half done and no token may be generated from that state.
        """
        if not self.done.set_running_or_notify_cancel():
            return  # the caller has cancelled it
        try:
            self.action()
        except HeadwaterError as refusal:
            self.done.set_exception(refusal)
        except Exception as error:
            self.done.set_exception(error)
            raise
        else:
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """Report to the caller that the action will never run."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


def wait_for(done: Future[None], name: str) -> None:
    """Wait until the engine's thread has run a command. After ten minutes, cancel it and raise ``WaitTimeout``."""
    try:
        wait_for_future(done, lambda: f"{name} in the engine", kind="engine_call", hard_limit_s=_CONTROL_LIMIT_S)
    except WaitTimeout as error:
        if done.cancel():
            state = "was waiting for running requests and is cancelled; abort the requests, or use another update mode"
        elif done.done():
            return done.result()  # it finished at the last moment
        else:
            state = "has started but does not finish; the device may be hanging: end the process"
        raise WaitTimeout(f"gave up after {_CONTROL_LIMIT_S:.0f} s: {name} {state}") from error


class Gathering:
    """Collects the responses to a list of requests. The caller is woken once, when the last request has ended."""

    def __init__(self, num_requests: int) -> None:
        self._ended: list[EngineSequence | None] = [None] * num_requests
        self._num_left = num_requests
        self._changed = threading.Condition()

    def take(self, place: int, ended: EngineSequence) -> None:
        self._ended[place] = ended
        self._num_left -= 1  # only the engine's thread calls this
        if not self._num_left:
            with self._changed:
                self._changed.notify_all()

    def wait(self, progress: Callable[[], object]) -> list[ModelResponse]:
        """Wait for the last response. Raises ``WaitTimeout`` if the engine makes no progress for ten minutes.

        ``progress`` is called regularly; its value changes while the engine works. It returns ``None`` while the
        engine is paused or asleep, and that time counts only towards the limit of the whole wait, one week.
        """
        seen, since = progress(), time.monotonic()

        def have_ended() -> bool:
            nonlocal seen, since
            if not self._num_left:
                return True
            now = progress()
            if now is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL_LIMIT_S:
                raise WaitTimeout(
                    f"gave up on {self._num_left} of {len(self._ended)} requests: the engine has computed nothing for "
                    f"{_STALL_LIMIT_S:.0f} s; the device may be hanging: end the process"
                )
            return False

        def describe() -> str:
            state = "is paused, asleep or without weights" if progress() is None else "generates"
            return f"Engine.generate waits for {self._num_left} of {len(self._ended)} requests; the engine {state}"

        with self._changed:
            wait_until(self._changed, have_ended, describe, kind="engine_call", hard_limit_s=_GENERATE_LIMIT_S)
        return [result_of(ended) for ended in self._ended if ended is not None]


class Mailbox:
    """Callbacks for an event loop, posted from another thread. Many callbacks wake the event loop only once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._actions: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def post(self, action: Callable[..., object], *arguments: Any) -> None:
        with self._lock:
            self._actions.append((action, arguments))
            is_first = len(self._actions) == 1
        # The event loop takes everything in the mailbox at once, so only the first callback has to wake it.
        if is_first:
            with suppress(RuntimeError):  # no caller waits on a closed event loop
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        with self._lock:
            actions, self._actions = self._actions, []
        for action, arguments in actions:
            try:
                action(*arguments)
            except Exception as error:  # noqa: BLE001  the other callbacks belong to other callers and must still run
                self._loop.call_exception_handler(
                    {"message": "a result of the engine could not be delivered", "exception": error}
                )


class Mailboxes:
    """One mailbox per event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_loop: dict[asyncio.AbstractEventLoop, Mailbox] = {}

    def of_running_loop(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if (known := self._of_loop.get(loop)) is not None:
            return known
        with self._lock:
            if loop not in self._of_loop:
                for closed in [each for each in self._of_loop if each.is_closed()]:
                    del self._of_loop[closed]
                self._of_loop[loop] = Mailbox(loop)
            return self._of_loop[loop]


def settle(answer: asyncio.Future[ModelResponse], ended: EngineSequence) -> None:
    """Pass the result to the caller, unless it has stopped waiting."""
    if answer.done():
        return
    try:
        answer.set_result(result_of(ended))
    except RolloutFailed as failure:
        answer.set_exception(failure)


def result_of(ended: EngineSequence) -> ModelResponse:
    if ended.error is not None:
        raise failure_of(ended)
    return ended.response()


def failure_of(ended: EngineSequence) -> RolloutFailed:
    name = f"request {ended.request.request_id}"
    if isinstance(ended.error, LogitsBroken):
        return LogitsBroken(f"{name}: {ended.error}")
    if isinstance(ended.error, RequestError):
        return ended.error  # it names the request
    failure = RolloutFailed(f"{name}: the engine failed: {type(ended.error).__name__}: {ended.error}")
    failure.__cause__ = ended.error
    return failure


_WINDOW_S = 5.0
_LEAST_SPAN_S = 1.0


class Throughput:
    """Counts tokens and computes the recent rate. The engine's thread counts; other threads read."""

    def __init__(self) -> None:
        self.total = 0
        self._born = time.monotonic()
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int) -> None:
        now = time.monotonic()
        self.total += num_tokens
        with self._lock:
            self._marks.append((now, num_tokens))
            self._forget_before(now - _WINDOW_S)

    def per_second(self) -> float:
        now = time.monotonic()
        with self._lock:
            self._forget_before(now - _WINDOW_S)
            num_recent = sum(count for _, count in self._marks)
        # Divide by the whole window, including idle time. Since the first mark, a single round would look enormous.
        return num_recent / min(_WINDOW_S, max(_LEAST_SPAN_S, now - self._born))

    def _forget_before(self, when: float) -> None:
        while self._marks and self._marks[0][0] < when:
            self._marks.popleft()
