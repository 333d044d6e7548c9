"""Runs the methods of tools: with a time limit, a limit on how many run at once, and never on the event loop's thread
if they are plain functions.

A thread of Python cannot be killed. A plain function that exceeds its time limit is interrupted: an exception is
raised in it at its next Python instruction. A function that blocks in C code, for example in ``time.sleep``, sees the
exception only when it returns. Until then it keeps its slot, as does a coroutine that ignores its cancellation. So a
tool never has more threads than ``max_concurrent``. When all its slots are blocked, its calls fail at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

from headwater.tools.base import ToolUnavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")

GRACE_S = 1.0
"""How long a call may take to end after it was cancelled, before its slot counts as blocked."""


_MANY_INSTRUCTIONS = 10_000
"""More than Python executes before it raises an error that another thread has asked for."""

BLOCKED_S = 0.5
"""A coroutine function that computes for longer without a wait is reported: nothing else runs meanwhile."""


class CallTimedOut(Exception):
    """A method did not return within its time limit."""


class Slots:
    """At most ``limit`` calls of one tool at the same time; others wait in order.

    When all slots are blocked, calls fail with ``ToolUnavailable``, or wait if ``is_patient``.
    """

    def __init__(self, name: str, limit: int, *, is_patient: bool = False) -> None:
        self.name = name
        self.limit = limit
        self._is_patient = is_patient
        self.num_running = 0
        self.num_blocked = 0
        """Calls that did not end although they were cancelled. They are among the running ones."""
        self._has_warned = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_blocked(self) -> bool:
        """Whether all slots are held by calls that do not end."""
        return self.num_blocked >= self.limit

    async def run(
        self,
        start: Callable[[], Coroutine[Any, Any, T]],
        timeout_s: float,
        on_late: Callable[[T], object] | None = None,
    ) -> T:
        """Run ``start()`` in a slot. The time in which it waits for the slot does not count.

        ``on_late`` receives the result of a call that succeeded after its caller had stopped waiting.
        """
        await self._acquire()
        task = asyncio.ensure_future(start())
        task.add_done_callback(self._ended)
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._cancel(task, on_late)
            await asyncio.wait({task}, timeout=GRACE_S)
            raise
        if done:
            return task.result()
        self._cancel(task, on_late)
        await asyncio.wait({task}, timeout=GRACE_S)
        raise CallTimedOut

    async def _acquire(self) -> None:
        if self.is_blocked and not self._is_patient:
            raise self._all_blocked()
        if self.num_running < self.limit:
            self.num_running += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release()  # it got the slot in the moment in which it was cancelled
            raise

    def _release(self) -> None:
        """Pass the slot on."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.num_running -= 1

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._release()
        if not task.cancelled():
            task.exception()  # otherwise asyncio would log the error of a call that no one waits for

    def _cancel(self, task: asyncio.Task[T], on_late: Callable[[T], object] | None) -> None:
        task.cancel()
        if on_late is not None:
            task.add_done_callback(lambda ended: on_late(ended.result()) if has_succeeded(ended) else None)
        if not task.done():
            asyncio.get_running_loop().call_later(GRACE_S, self._block, task)

    def _block(self, task: asyncio.Task[Any]) -> None:
        if task.done():
            return
        self.num_blocked += 1
        task.add_done_callback(self._unblock)
        if not self._has_warned:
            logger.warning(
                "tool %s: a call did not end %.0f s after it was cancelled; such calls keep one of the %d slots until "
                "they end", self.name, GRACE_S, self.limit,
            )  # fmt: skip
        self._has_warned = True
        if self.is_blocked and not self._is_patient:
            while self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.done():
                    waiter.set_exception(self._all_blocked())

    def _unblock(self, task: asyncio.Task[Any]) -> None:
        self.num_blocked -= 1

    def _all_blocked(self) -> ToolUnavailable:
        return ToolUnavailable(f"all {self.limit} slots of {self.name} are held by calls that do not end")


def has_succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


async def call_method(
    call: Callable[[], Any], on_block: Callable[[float], None] = lambda _: None, *, interrupt: bool = True
) -> Any:
    """Call a coroutine function on the event loop, or a plain function in a thread.

    ``on_block`` is told for how many seconds a coroutine function blocked the event loop. ``interrupt=False`` lets a
    thread finish after a cancellation, so that its result is never lost.
    """
    function = call.func if isinstance(call, partial) else call
    if inspect.iscoroutinefunction(function):
        return await _watched(call(), on_block)
    result = await _in_thread(call, interrupt)
    return await result if inspect.isawaitable(result) else result


@types.coroutine
def _watched(coroutine: Coroutine[Any, Any, T], on_block: Callable[[float], None]) -> Generator[Any, Any, T]:
    """The result of ``coroutine``, whose every step between two waits is timed."""
    step: Callable[[Any], Any] = coroutine.send
    argument: Any = None
    while True:
        began = time.perf_counter()
        try:
            waits_for = step(argument)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            seconds = time.perf_counter() - began
            if seconds > BLOCKED_S:
                on_block(seconds)
        try:
            argument = yield waits_for
            step = coroutine.send
        except BaseException as error:  # noqa: BLE001  a cancellation, for example, belongs to the coroutine
            step, argument = coroutine.throw, error


async def _in_thread(call: Callable[[], Any], interrupt: bool) -> Any:
    """Run a blocking call in a daemon thread, which cannot delay the end of the process.

    The first cancellation interrupts the thread, and waits until it ends. The second one does not wait.
    """
    worker = _Worker(call, asyncio.get_running_loop())
    worker.start()
    try:
        return await asyncio.shield(worker.outcome)
    except asyncio.CancelledError:
        if interrupt:
            worker.interrupt()
        return await worker.outcome


class _Interrupted(BaseException):
    """Raised in the thread of a cancelled call. It is no ``Exception``, so that tools do not catch it by mistake."""


class _Worker:
    """A thread that runs one call."""

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: asyncio.Future[Any] = loop.create_future()
        self._call = call
        self._loop = loop
        self._lock = threading.Lock()
        self._is_calling = True
        self._is_interrupted = False
        self._thread = threading.Thread(target=self._run, name="tool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def interrupt(self) -> None:
        with self._lock:
            if self._is_calling:
                self._is_interrupted = True
                self._raise_in_thread()

    def _raise_in_thread(self) -> None:
        """Raise ``_Interrupted`` at the thread's next Python instruction."""
        if self._thread.ident is not None:
            error = ctypes.py_object(_Interrupted)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), error)

    def _take_interruption(self) -> None:
        """Let an error that was not raised yet be raised here.

        Python can withdraw such an error, too. But a process on Python 3.11 that had done so hung under a profiler.
        """
        with contextlib.suppress(_Interrupted):
            self._raise_in_thread()
            for _ in range(_MANY_INSTRUCTIONS):
                pass

    def _run(self) -> None:
        try:
            settle = self._outcome()
        except _Interrupted:  # raised after the call had returned
            settle = self._cancel
        # If the run ended before this call, the loop is closed and the result is not needed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle)

    def _outcome(self) -> Callable[[], None]:
        try:
            value = self._call()
        except _Interrupted:
            return self._cancel
        except BaseException as error:  # noqa: BLE001  raised again in the awaiting coroutine
            return partial(self._fail, error)
        finally:
            with self._lock:
                self._is_calling = False
            if self._is_interrupted:
                self._take_interruption()
        return partial(self._settle, value)

    def _settle(self, value: Any) -> None:
        if not self.outcome.done():
            self.outcome.set_result(value)

    def _cancel(self) -> None:
        self.outcome.cancel()

    def _fail(self, error: BaseException) -> None:
        if self.outcome.done():
            return
        # A future cannot hold a StopIteration, and SystemExit would end the event loop.
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            error = RuntimeError(f"raised {type(error).__name__}: {error}")
        self.outcome.set_exception(error)
