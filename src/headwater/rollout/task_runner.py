"""The thread that runs all episodes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from headwater.core.errors import WaitTimeout
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
