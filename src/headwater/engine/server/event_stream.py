"""Server-sent events: a reply in pieces, and what happens when its reader leaves or it fails half-way."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.engine.server import json_body
from headwater.engine.server.errors import api_error

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"


async def send_events(request: web.Request, events: AsyncGenerator[dict[str, Any], None]) -> web.StreamResponse:
    """Send ``events`` as they come. Whatever ends this early closes ``events`` and so aborts its requests.

    Nothing is sent before the first event is there, so that a request the engine refuses gets its status code.
    """
    async with aclosing(events):
        first = await anext(events, None)
        response = web.StreamResponse(headers=_HEADERS)
        try:
            await response.prepare(request)
            if first is not None:
                await response.write(_event(first))
            try:
                async for event in events:
                    await response.write(_event(event))
            except HeadwaterError as error:
                # The status is sent; clients look for an error among the events.
                await response.write(_event(api_error(error).body()))
            await response.write(_DONE)
            await response.write_eof()
        except ConnectionError:
            pass  # the reader has left, and leaving the block aborts what ran for it
        return response


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json_body.write(value) + b"\n\n"
