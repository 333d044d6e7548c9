"""Starts jobs while there is capacity, and collects their results."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Generic, TypeVar

from headwater.core.errors import RolloutFailed
from headwater.rollout.task_runner import AsyncTaskRunner

Job = TypeVar("Job")
Result = TypeVar("Result")


class BatchTaskDispatcher(Generic[Job, Result]):
    """A producer on the event loop and a consumer on the caller's thread. ``capacity`` limits the producer.

    The producer starts as many jobs as ``capacity`` allows: submitted jobs first, then jobs from ``draw``. It checks
    the capacity whenever a job ends and after ``notify``. The consumer waits for results. An error of a job or of
    ``draw`` is raised in the consumer, and no job starts after an error.
    """

    def __init__(
        self,
        tasks: AsyncTaskRunner,
        work: Callable[[Job], Awaitable[Result]],
        *,
        capacity: Callable[[], int],
        starting: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """``work`` is called when a job is admitted and awaited later, so ``capacity`` sees what the call counts.

        ``starting`` is entered while jobs that begin together start.
        """
        self._tasks = tasks
        self._work = work
        self._capacity = capacity
        self._starting = starting
        self._draw: Callable[[int], Sequence[Job]] | None = None
        self._is_exhausted = True
        self._submitted: deque[Job] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._is_admitting = False
        self._admission: asyncio.Task[None] | None = None
        self._must_look_again = False
        self._is_paused = False
        self._changed = threading.Condition()
        self._results: list[Result] = []
        self._error: BaseException | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_submitted(self) -> int:
        """Jobs that wait for capacity."""
        return len(self._submitted)

    def submitted(self) -> list[Job]:
        return list(self._submitted)

    # The producer

    def open(self, draw: Callable[[int], Sequence[Job]]) -> None:
        """Take jobs from ``draw`` from now on. It returns fewer jobs than requested if there are no more."""
        self._draw, self._is_exhausted = draw, False
        self.notify()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start these jobs as soon as there is capacity."""
        self._submitted.extend(jobs)
        self.notify()

    def pause(self) -> None:
        """Start no more jobs. Running jobs continue."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.notify()

    def notify(self) -> None:
        """The capacity may have changed."""
        self._tasks.post(self._look)

    def _look(self) -> None:
        if self._is_admitting:
            self._must_look_again = True  # it may have made its last check before the capacity changed
            return
        if self._is_paused or self._error is not None or self._capacity() <= 0:
            self._tell_consumer()
            return
        self._is_admitting = True
        self._admission = asyncio.ensure_future(self._admit())
        self._admission.add_done_callback(self._admitted)

    async def _admit(self) -> None:
        while not self._is_paused and self._error is None and (room := self._capacity()) > 0:
            count = self._fetch(room)
            if not count:
                return
            async with self._starting():
                for _ in range(count):
                    task = asyncio.ensure_future(self._gather(self._work(self._submitted.popleft())))
                    self._running.add(task)
                    task.add_done_callback(self._ended)

    def _admitted(self, task: asyncio.Task[None]) -> None:
        self._is_admitting = False
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        if self._must_look_again:
            self._must_look_again = False
            self._look()
        self._tell_consumer()

    def _fetch(self, count: int) -> int:
        """Make sure that ``count`` jobs wait, or as many as there are. A job waits until it actually starts."""
        missing = count - len(self._submitted)
        if self._draw is not None and missing > 0:
            drawn = self._draw(missing)
            self._is_exhausted = len(drawn) < missing
            self._submitted.extend(drawn)
        return min(count, len(self._submitted))

    async def _gather(self, begun: Awaitable[Result]) -> None:
        result = await begun
        with self._changed:
            self._results.append(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._fail(RolloutFailed("the rollouts were cancelled"))  # for example because their thread ends
        elif (error := task.exception()) is not None:
            self._fail(error)
        self._running.discard(task)  # after its error is set, or the consumer could conclude that all work is done
        self._look()
        self._tell_consumer()

    def _fail(self, error: BaseException) -> None:
        """Keep the first error for the consumer, and cancel all running jobs."""
        if self._error is None:
            self._error = error
        for task in self._running:
            task.cancel()
        if self._admission is not None:
            self._admission.cancel()  # it may wait for jobs that were cancelled before they began

    def _tell_consumer(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The consumer

    def wait_results(
        self,
        count: int,
        describe: Callable[[], str],
        *,
        hard_limit_s: float,
        look: Callable[[], object] = lambda: None,
    ) -> list[Result]:
        """Wait for ``count`` results and return all that have arrived; fewer if nothing runs and nothing can start.

        ``look`` is called at least once a second.
        """

        def is_over() -> bool:
            look()
            if self._error is not None or not self._tasks.is_alive:
                return True
            return len(self._results) >= count or self._is_idle()

        with self._changed:
            self._tasks.wait(self._changed, is_over, describe, kind="batch", hard_limit_s=hard_limit_s)
            if self._error is not None:
                raise self._error
            if not self._tasks.is_alive:
                raise RolloutFailed("the thread that runs all episodes has ended; this is a bug, please report it")
            results, self._results = self._results, []
            return results

    def peek_results(self) -> list[Result]:
        """Results that have arrived and were not taken."""
        with self._changed:
            return list(self._results)

    def _is_idle(self) -> bool:
        """Whether nothing runs and nothing can start. The consumer calls this while the event loop continues.

        Therefore the order of the checks matters. A job that takes the last capacity is first being admitted, then it
        runs, and it cannot end during the check because its result needs the lock. In the opposite order, a job that
        starts between the two checks would already use the capacity and not yet be seen as running.
        """
        can_start = (self._submitted or not self._is_exhausted) and self._capacity() > 0
        return not (can_start or self._is_paused or self._is_admitting or self._running)
