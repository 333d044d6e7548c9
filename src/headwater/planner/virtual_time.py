"""An event loop whose clock jumps to the next event. The rollout code runs on it unchanged, and no time passes."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from headwater.core.errors import RunError, WaitTimeout
from headwater.rollout.dispatcher import AsyncTaskRunner

T = TypeVar("T")

_ROUNDING_S = 1e-9
"""The clock is a sum of intervals, so it may be slightly before the time of an alarm that it has reached."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where a real loop would sleep until its next timer, this one adds the time to its clock.

    ``is_over`` is asked whenever nothing is left to do at the present time, before the clock moves. If it is true, the
    loop stops. The waiting thread therefore sees every moment after all its events and never in between.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.is_over: Callable[[], object] = lambda: False
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float | None) -> None:
        if seconds is not None and seconds <= 0:
            return
        if self.is_over():
            self.stop()
        elif seconds is None:
            raise RunError("the simulation has no next event, but something waits; this is a bug, please report it")
        else:
            self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Asked by the loop to sleep. No file is watched except the loop's own, which nothing writes to."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._loop._jump(timeout)
        return []


class VirtualTasks(AsyncTaskRunner):
    """Runs the episodes on the caller's own thread, whenever the caller waits.

    with VirtualTasks() as tasks:
        executor = WorkflowExecutor(engine, groups, tasks, ...)
        batch = executor.prepare_batch(prompts)      # runs events until the batch is complete
        tasks.sleep(12.0)                            # the learner trains for 12 virtual seconds
    """

    def __init__(self) -> None:
        self.loop: VirtualLoop = VirtualLoop()
        self.while_waiting = None
        self._at_end = []

    def __enter__(self) -> VirtualTasks:
        return self

    @property
    def is_alive(self) -> bool:
        return self.is_open

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        raise NotImplementedError("a simulation starts no coroutines from outside")

    def call(self, function: Callable[[], T], what: str) -> T:
        return function()

    def post(self, function: Callable[[], object]) -> None:
        self.loop.call_soon(function)

    def wait(
        self,
        condition: threading.Condition | None,
        predicate: Callable[[], object],
        describe: Callable[[], str],
        *,
        kind: str,
        hard_limit_s: float,
    ) -> None:
        deadline = self.loop.time() + hard_limit_s
        self._run_until(lambda: predicate() or self.loop.time() >= deadline - _ROUNDING_S, deadline)
        if not predicate():
            raise WaitTimeout(f"{describe()}: not finished after {hard_limit_s:.0f} simulated seconds")

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass on the virtual clock."""
        deadline = self.loop.time() + seconds
        self._run_until(lambda: self.loop.time() >= deadline - _ROUNDING_S, deadline)

    def _run_until(self, is_over: Callable[[], object], deadline: float) -> None:
        self.loop.is_over = is_over
        alarm = self.loop.call_at(deadline, lambda: None)
        try:
            self.loop.run_forever()
        finally:
            alarm.cancel()

    def close(self) -> None:
        if not self.is_open:
            return
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.is_over = lambda: True
        self.loop.run_forever()
        self.loop.close()
