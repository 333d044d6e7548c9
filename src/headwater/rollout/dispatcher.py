"""Starts jobs while there is capacity, and collects their results."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Generic, Self, TypeVar

from headwater.core.errors import RolloutFailed, WaitTimeout
from headwater.core.waits import wait_for_future, wait_until

T = TypeVar("T")
logger = logging.getLogger(__name__)

_CALL_LIMIT_S = 600.0
"""Only code that blocks the event loop can make a call take this long."""
_END_LIMIT_S = 30.0
_CANCEL_AGAIN_S = 0.5


class AsyncTaskRunner:
    """One event loop in a separate thread, so that episodes continue while the caller trains.

    Waiting episodes are small objects, not threads, so ten thousand of them need no more threads than one.

        with AsyncTaskRunner() as tasks:
            future = tasks.start(episode())      # from any thread
            future.result()
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.while_waiting: Callable[[], object] | None = None
        """Called about once a second by a thread that waits for rollouts. Set by the trainer."""
        self._at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._run, name="headwater-rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def is_open(self) -> bool:
        return not self.loop.is_closed()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine``. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], T], what: str) -> T:
        """Run ``function()`` on the loop's thread, between two steps of the episodes, where the state is consistent."""
        if threading.current_thread() is self._thread:
            return function()

        async def run() -> T:
            return function()

        return wait_for_future(self.start(run()), lambda: what, kind="rollout_thread", hard_limit_s=_CALL_LIMIT_S)

    def post(self, function: Callable[[], object]) -> None:
        """Like ``call``, but do not wait for the result."""
        self.loop.call_soon_threadsafe(function)

    def wait(
        self,
        condition: threading.Condition,
        predicate: Callable[[], object],
        describe: Callable[[], str],
        *,
        kind: str,
        hard_limit_s: float,
    ) -> None:
        """Let the caller's thread wait for the episodes until ``predicate`` is true. The caller holds ``condition``."""
        wait_until(
            condition, predicate, describe, kind=kind, hard_limit_s=hard_limit_s, while_waiting=self.while_waiting
        )

    def at_end(self, clean_up: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``clean_up()`` on the loop when the runner is closed, after all episodes have ended."""
        self._at_end.append(clean_up)

    def close(self) -> None:
        """Cancel everything that runs, wait until it has ended, clean up, and end the thread."""
        if not self.is_open:
            return
        if self.is_alive:
            self._end(_cancel_all_others(), "waiting for cancelled episodes to end")
            for clean_up in self._at_end:
                self._end(clean_up(), "ending what the episodes have used")
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_END_LIMIT_S)
        if self.is_alive:  # some code blocks it; the thread is a daemon, so the process can still end
            logger.warning("the thread that runs the episodes did not end because a workflow blocks it; ignoring it")
        else:
            self.loop.close()

    def _end(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            wait_for_future(self.start(work), lambda: what, kind="rollout_thread", hard_limit_s=_END_LIMIT_S)
        except WaitTimeout:
            logger.warning("%s took longer than %.0f s; ignoring it", what, _END_LIMIT_S)
        except Exception:
            logger.warning("%s failed", what, exc_info=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _cancel_all_others() -> None:
    """After Ctrl-C or an error, nothing may continue in the background. Engines stop requests that are cancelled."""
    myself = asyncio.current_task()
    while others := asyncio.all_tasks() - {myself}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_CANCEL_AGAIN_S)  # repeated, because an episode may suppress a cancellation
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _all_of(count: int) -> int:
    """For jobs that need no preparation."""
    return count


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
        self._read_ahead: Callable[[int], Awaitable[int]] = _all_of
        self._is_exhausted = True
        self.is_reading = False
        """Whether the producer waits for jobs to be read, see ``open``."""
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

    def open(
        self, draw: Callable[[int], Sequence[Job]], read_ahead: Callable[[int], Awaitable[int]] | None = None
    ) -> None:
        """Take jobs from ``draw`` from now on. It returns fewer jobs than requested if there are no more.

        ``read_ahead`` is awaited before: it prepares the next jobs elsewhere, because ``draw`` runs on the event loop,
        and returns how many of them may be drawn now, at least one.
        """
        self._draw, self._read_ahead, self._is_exhausted = draw, read_ahead or _all_of, False
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
        if self._room() <= 0:
            self._tell_consumer()
            return
        self._is_admitting = True
        self._admission = asyncio.ensure_future(self._admit())
        self._admission.add_done_callback(self._admitted)

    async def _admit(self) -> None:
        while (room := self._room()) > 0:
            num_missing = room - len(self._submitted)
            if self._draw is not None and num_missing > 0:
                self.is_reading = True
                try:
                    num_ready = await self._read_ahead(num_missing)
                finally:
                    self.is_reading = False
                # The rollouts may have been paused meanwhile, or have failed.
                if (room := min(self._room(), len(self._submitted) + num_ready)) < 1:
                    continue
            count = self._fetch(room)
            if not count:
                return
            async with self._starting():
                for _ in range(count):
                    task = asyncio.ensure_future(self._gather(self._work(self._submitted.popleft())))
                    self._running.add(task)
                    task.add_done_callback(self._ended)

    def _room(self) -> int:
        """How many jobs may start now."""
        return 0 if self._is_paused or self._error is not None else self._capacity()

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
