"""Replies in pieces, as server-sent events or line by line; and what happens when the reader leaves or one fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.serving import json_body
from headwater.serving.errors import api_error

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_EVENTS = {**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
_LINES = {**_HEADERS, "Content-Type": "application/x-ndjson; charset=utf-8"}
_DONE = b"data: [DONE]\n\n"

Pieces = AsyncGenerator[dict[str, Any], None]


async def send_events(request: web.Request, events: Pieces) -> web.StreamResponse:
    """Send ``events`` as they come. Whatever ends this early closes ``events`` and so aborts its requests."""
    return await _send(request, events, _EVENTS, _event, _DONE)


async def send_lines(request: web.Request, lines: Pieces) -> web.StreamResponse:
    """As ``send_events``, one JSON object to a line."""
    return await _send(request, lines, _LINES, _line, b"")


async def _send(
    request: web.Request, pieces: Pieces, headers: dict[str, str], frame: Callable[[dict[str, Any]], bytes], end: bytes
) -> web.StreamResponse:
    """Nothing is sent before the first piece is there, so that a request the engine refuses gets its status code."""
    async with aclosing(pieces):
        first = await anext(pieces, None)
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            if first is not None:
                await response.write(frame(first))
            try:
                async for piece in pieces:
                    await response.write(frame(piece))
            except HeadwaterError as error:
                # The status is sent; clients look for an error among the pieces.
                await response.write(frame(api_error(error).body()))
            await response.write_eof(end)
        except ConnectionError:
            pass  # the reader has left, and leaving the block aborts what ran for it
        return response


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json_body.write(value) + b"\n\n"


def _line(value: dict[str, Any]) -> bytes:
    return json_body.write(value) + b"\n"
