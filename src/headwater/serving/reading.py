"""Reading request bodies: a limit in bytes and in seconds, and threads that parse and tokenise them.

A body may take seconds to tokenise. The event loop does not wait for it, and other requests are answered meanwhile. If
the client disconnects, its body is not read to the end:

    reader = BodyReader(max_bytes=2**26, limit_s=120.0)
    body = await reader.receive(request)
    plan = await reader.in_thread(lambda: read(body))     # ``read`` calls ``check_client`` between two long steps

Images take longer than text. What reads them calls ``continue_as_long_work``, which uses other threads, so that
requests with text do not wait for images of others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from aiohttp import web

from headwater.serving.errors import ApiError
from headwater.serving.fields import read_object

T = TypeVar("T")

_NUM_THREADS = 4
"""Few, because Python runs one of them at a time, and each can delay the event loop by some milliseconds."""
_SLOW_BYTES = 2**15
"""The body of a control call that is longer than this takes milliseconds to parse, so it is parsed in a thread."""
_NUM_LONG_THREADS = 4
"""Few, because each can need the memory of a large picture."""

_client_left: ContextVar[threading.Event | None] = ContextVar("client_left", default=None)
_must_be_short: ContextVar[bool] = ContextVar("must_be_short", default=False)


class ClientLeft(Exception):
    """The client has disconnected, so nothing waits for the result."""


def check_client() -> None:
    """Raise ``ClientLeft`` if the client whose body this thread reads has disconnected."""
    left = _client_left.get()
    if left is not None and left.is_set():
        raise ClientLeft


class _IsLong(Exception):
    """The work needs a thread for long work."""


def continue_as_long_work() -> None:
    """Announce that what follows may take seconds. If this thread is for short work, ``BodyReader`` does the work again
    from its beginning in a thread for long work."""
    if _must_be_short.get():
        raise _IsLong


class BodyReader:
    """Receives bodies on the event loop, and runs what reads them in a few threads."""

    def __init__(self, *, max_bytes: int, limit_s: float) -> None:
        self._max_bytes = max_bytes
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="headwater-body")
        self._long_threads = ThreadPoolExecutor(_NUM_LONG_THREADS, thread_name_prefix="headwater-body-long")

    async def receive(self, request: web.Request) -> bytes:
        """The body of ``request``."""
        try:
            # If the client declares the length, refuse the body before reading it.
            if request.content_length is not None and request.content_length > self._max_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=self._max_bytes, actual_size=request.content_length)
            async with asyncio.timeout(self._limit_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(
                f"the body has more than {self._max_bytes} bytes; send less at a time, or start the server with a "
                "larger --max-body-mib",
                status=413,
                code="body_too_large",
            ) from error
        except TimeoutError as error:
            raise ApiError(
                f"the body did not arrive within {self._limit_s:g} s; send the request again",
                status=408,
                code="body_timeout",
                headers={"Connection": "close"},
            ) from error
        except (web.RequestPayloadError, web.HTTPBadRequest) as error:  # for example a wrong chunk or wrong gzip data
            reason = " ".join(str(error).split())
            raise ApiError(
                f"the body cannot be decoded: {reason}; check Content-Length, Transfer-Encoding and Content-Encoding",
                code="bad_body",
            ) from error

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread. If the caller is cancelled, ``check_client`` raises in that thread."""
        left = threading.Event()
        context = copy_context()
        context.run(_client_left.set, left)
        context.run(_must_be_short.set, True)
        try:
            return await asyncio.wrap_future(self._threads.submit(context.run, work))
        except _IsLong:
            context.run(_must_be_short.set, False)
            return await asyncio.wrap_future(self._long_threads.submit(context.run, work))
        finally:
            left.set()

    async def read_control(self, request: web.Request, read: Callable[[Mapping[str, Any]], T]) -> T:
        """Parse the body of ``request`` as a JSON object and pass it to ``read``, in a thread only if it is long."""
        body = await self.receive(request)
        if len(body) > _SLOW_BYTES:
            return await self.in_thread(lambda: parse(body, read))
        return parse(body, read)

    def close(self) -> None:
        """End the threads when what they do now has ended."""
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def parse(body: bytes, read: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``read`` makes of a JSON object."""
    try:
        return read(read_object(body))
    except RecursionError as error:  # a chat template or a message about a value may descend further than the parser
        raise ApiError("the body is nested too deeply; send fewer levels", code="bad_json") from error


BODIES = web.AppKey("bodies", BodyReader)
