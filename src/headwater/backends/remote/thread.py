"""The thread of an engine whose work is done elsewhere: an event loop for connections, and a sender of weights.

thread = EngineThread("headwater-vllm")
thread.do(session.set_paused(True), "vLLM pauses")          # from any thread; waits
thread.post(lambda: session.enter(opened))                  # from any thread; does not wait
thread.submit(send, update)                                 # one update after the other
thread.close(session.end(), "vLLM ends")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from headwater.core.errors import HeadwaterError, RolloutFailed
from headwater.core.requests import Delta, ModelResponse
from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future
from headwater.engine.delivery import Mailbox, Mailboxes

T = TypeVar("T")
Deliver = Callable[[ModelResponse | HeadwaterError], None]
"""Takes the response to a request, or its error. Called once."""

_THREAD_END_S = 5.0


class EngineThread:
    """Callers may be on any thread or event loop."""

    def __init__(self, name: str) -> None:
        self.is_closed = False
        self._closing = threading.Lock()
        self._mailboxes = Mailboxes()
        self._loop = asyncio.new_event_loop()
        self._inbox = Mailbox(self._loop)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="headwater-weights")
        """Sends one update at a time, in the order in which they were requested."""
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def check_open(self) -> None:
        if self.is_closed:
            raise RolloutFailed("the engine is closed")

    def post(self, action: Callable[[], None]) -> None:
        """Run an action on the event loop later."""
        self._inbox.post(action)

    def enter(self, action: Callable[[], None]) -> None:
        """As ``post``; raises if the engine is closed, after which no request may enter."""
        with self._closing:
            self.check_open()
            self._inbox.post(action)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the event loop."""
        with self._closing:
            if self.is_closed:
                work.close()
            self.check_open()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def do(self, work: Coroutine[Any, Any, T], what: str, limit_s: float = ENGINE_CALL_LIMIT_S) -> T:
        """Run a coroutine on the event loop, and wait for it."""
        future = self.start(work)
        try:
            return wait_for_future(future, lambda: what, kind="engine_call", hard_limit_s=limit_s)
        finally:
            future.cancel()

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a function on the sender's thread, after those that were submitted before."""
        with self._closing:
            self.check_open()
            return self._sender.submit(work, *arguments)

    def close(self, end: Callable[[], Coroutine[Any, Any, None]], what: str) -> bool:
        """Run ``end``, cancel what is left, and end both threads. False if they were ended before."""
        with self._closing:
            if self.is_closed:
                return False
            self.is_closed = True
            ended = asyncio.run_coroutine_threadsafe(_end_all(end), self._loop)
        try:
            wait_for_future(ended, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)
            self._sender.shutdown(wait=True, cancel_futures=True)  # its calls have failed by now
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_THREAD_END_S)
            if not self._thread.is_alive():
                self._loop.close()
        return True

    async def answer(self, opened: Callable[[Deliver], AbstractContextManager[None]]) -> ModelResponse:
        """The response to the request that is open within the block of ``opened``."""
        answer: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        mailbox = self._mailboxes.of_running_loop()

        def deliver(result: ModelResponse | HeadwaterError) -> None:
            mailbox.post(lambda: _settle(answer, result))

        with opened(deliver):
            return await answer

    async def follow(
        self, opened: Callable[[Deliver, Callable[[Delta], None]], AbstractContextManager[None]]
    ) -> AsyncGenerator[Delta, None]:
        """As ``answer``, token by token."""
        news: asyncio.Queue[Delta | HeadwaterError] = asyncio.Queue()
        mailbox = self._mailboxes.of_running_loop()

        def deliver(result: ModelResponse | HeadwaterError) -> None:
            last = result if isinstance(result, HeadwaterError) else Delta((), (), (), result.stop_reason)
            mailbox.post(lambda: news.put_nowait(last))

        def take(new: Delta) -> None:
            mailbox.post(lambda: news.put_nowait(new))

        with opened(deliver, take):
            while True:
                new = await news.get()
                if isinstance(new, HeadwaterError):
                    raise new
                yield new
                if new.stop_reason is not None:
                    return


async def _end_all(end: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await end()
    unfinished = asyncio.all_tasks() - {asyncio.current_task()}
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


def _settle(answer: asyncio.Future[ModelResponse], result: ModelResponse | HeadwaterError) -> None:
    """Answer a caller, unless it has left."""
    if answer.done():
        return
    if isinstance(result, HeadwaterError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
