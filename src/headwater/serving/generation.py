"""Running the requests of one client together, and sending the reply whole or in parts.

When the client disconnects, or one request fails, all requests of the reply are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.core.protocols import InferenceEngine
from headwater.core.requests import Delta, ModelRequest, ModelResponse
from headwater.serving.errors import api_error
from headwater.serving.fields import write_json

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_EVENTS = {**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
_LINES = {**_HEADERS, "Content-Type": "application/x-ndjson; charset=utf-8"}
_DONE = b"data: [DONE]\n\n"

_AT_ONCE = 64
"""The number of requests or parts of one reply that are handled before others get their turn."""

Parts = AsyncGenerator[dict[str, Any], None]


async def generate_all(engine: InferenceEngine, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
    """All responses. If one request fails or the caller is cancelled, the others are aborted."""
    tasks: list[asyncio.Future[ModelResponse]] = []
    try:
        for request in requests:
            tasks.append(asyncio.ensure_future(engine.agenerate(request)))
            await _give_way(len(tasks))
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def stream_all(
    engine: InferenceEngine, requests: Sequence[ModelRequest]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas with the index of their request, as they arrive. Closing this generator aborts the running requests."""
    # Unbounded: it holds at most the requested tokens, and a slow client must not slow down the engine.
    arrived: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()

    async def pump(place: int) -> None:
        try:
            # Close the generator explicitly, so that the engine is told immediately and not by the garbage collector.
            async with aclosing(engine.astream(requests[place])) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((place, delta))
        finally:
            arrived.put_nowait((place, None))

    tasks: list[asyncio.Future[None]] = []
    try:
        for place in range(len(requests)):
            tasks.append(asyncio.ensure_future(pump(place)))
            await _give_way(len(tasks))
        num_running, num_deltas = len(tasks), 0
        while num_running:
            place, delta = await arrived.get()
            if delta is not None:
                num_deltas += 1
                await _give_way(num_deltas)
                yield place, delta
                continue
            num_running -= 1
            await tasks[place]  # raises the error that ended the stream, if any
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Future[ModelResponse]] | Sequence[asyncio.Future[None]]) -> None:
    # In parts, so that the event loop answers others meanwhile.
    try:
        for start in range(0, len(tasks), _AT_ONCE):
            part = tasks[start : start + _AT_ONCE]
            for task in part:
                task.cancel()
            # Wait, so that the engine has been told before the names of the requests can be used again.
            await asyncio.gather(*part, return_exceptions=True)
    finally:
        for task in tasks:  # the caller may be cancelled while it waits
            task.cancel()


async def _give_way(count: int) -> None:
    """Let the event loop answer other requests before this one continues, every ``_AT_ONCE`` calls."""
    if count % _AT_ONCE == 0:
        await asyncio.sleep(0)


def reply(value: Mapping[str, Any] | list[Any], status: int = 200) -> web.Response:
    return web.Response(body=write_json(value), status=status, content_type="application/json")


async def send_events(
    request: web.Request, events: Parts, frame: Callable[[dict[str, Any]], bytes] | None = None
) -> web.StreamResponse:
    """Send server-sent events as they arrive. If this ends early, ``events`` is closed, which aborts its requests."""
    return await _send(request, events, _EVENTS, frame or _event, _DONE)


async def send_lines(request: web.Request, lines: Parts) -> web.StreamResponse:
    """As ``send_events``, but send one JSON object per line."""
    return await _send(request, lines, _LINES, _line, b"")


async def _send(
    request: web.Request, parts: Parts, headers: dict[str, str], frame: Callable[[dict[str, Any]], bytes], end: bytes
) -> web.StreamResponse:
    """Wait for the first part before sending the status, so that a refused request gets an error status."""
    async with aclosing(parts):
        first = await anext(parts, None)
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            if first is not None:
                await response.write(frame(first))
            try:
                async for part in parts:
                    await response.write(frame(part))
            except HeadwaterError as error:
                # The status was already sent, so the error becomes the last part.
                await response.write(frame(api_error(error).body()))
            await response.write_eof(end)
        except ConnectionError:
            pass  # the client has disconnected; leaving the block aborts its requests
        return response


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + write_json(value) + b"\n\n"


def _line(value: dict[str, Any]) -> bytes:
    return write_json(value) + b"\n"
