"""Scoring functions in threads of this process (``reward.where: threads``)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


async def in_daemon_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking call in a daemon thread. Unlike a thread pool, a call that hangs cannot delay process exit."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            set_outcome(value)

    def work() -> None:
        try:
            with _event_loop():
                done = partial(settle, outcome.set_result, call())
        except BaseException as error:  # noqa: BLE001  raised again in the awaiting coroutine
            done = partial(settle, outcome.set_exception, error)
        # If the run ended before this call, the loop is closed and the result is not needed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await outcome


@contextlib.contextmanager
def _event_loop() -> Iterator[None]:
    """An event loop for this thread, for functions that call ``get_event_loop().run_until_complete``."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()
