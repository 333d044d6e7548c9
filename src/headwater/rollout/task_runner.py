"""The thread that all episodes run on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from headwater.core.errors import WaitTimeout
from headwater.core.waits import wait_for_future

T = TypeVar("T")
logger = logging.getLogger(__name__)

_CALL_LIMIT_S = 600.0
"""Only code that blocks the event loop could make it wait so long."""
_END_LIMIT_S = 30.0
_CANCEL_AGAIN_S = 0.5


class AsyncTaskRunner:
    """One event loop in a thread of its own, so that episodes go on while the caller trains.

    Ten thousand episodes that wait are ten thousand small objects here, and not one more thread.

        with AsyncTaskRunner() as tasks:
            future = tasks.start(episode())      # from any thread
            future.result()
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
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
        """Begin ``coroutine``; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], T], what: str) -> T:
        """``function()`` on the loop's thread, between two steps of the episodes: it sees a state that is whole."""
        if threading.current_thread() is self._thread:
            return function()

        async def run() -> T:
            return function()

        return wait_for_future(self.start(run()), lambda: what, kind="rollout_thread", hard_limit_s=_CALL_LIMIT_S)

    def post(self, function: Callable[[], object]) -> None:
        """As ``call``, without waiting for it."""
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel whatever runs, wait until it has ended, and end the thread."""
        if not self.is_open:
            return
        if self.is_alive:
            self._cancel_all()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_END_LIMIT_S)
        if self.is_alive:  # code that blocks it; a daemon, so the process can end all the same
            logger.warning("the thread of the episodes does not end; a workflow blocks it and is left behind")
        else:
            self.loop.close()

    def _cancel_all(self) -> None:
        ended = self.start(_cancel_all_others())
        try:
            wait_for_future(ended, lambda: "cancelled episodes end", kind="rollout_thread", hard_limit_s=_END_LIMIT_S)
        except WaitTimeout:
            logger.warning("some episodes do not end although they were cancelled; they are left behind")

    def __enter__(self) -> AsyncTaskRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _cancel_all_others() -> None:
    """After Ctrl-C or an error nothing may go on behind our back; engines stop what nobody waits for."""
    myself = asyncio.current_task()
    while others := asyncio.all_tasks() - {myself}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_CANCEL_AGAIN_S)  # an episode may swallow one, so it is not the last
    await asyncio.get_running_loop().shutdown_asyncgens()
