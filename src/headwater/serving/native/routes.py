"""Handlers of Headwater's own generation calls."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from headwater.core.records import ModelRequest
from headwater.serving.errors import ApiError
from headwater.serving.event_stream import send_lines
from headwater.serving.native.connection import Connection
from headwater.serving.native.lines import line_of
from headwater.serving.native.request import check_length, read_request
from headwater.serving.state import STATE, ServerState

SOCKETS = web.AppKey("sockets", weakref.WeakSet[web.WebSocketResponse])


async def generate(request: web.Request) -> web.StreamResponse:
    """One request; its tokens line by line as they are made."""
    state = request.app[STATE]
    asked = await state.read(request, lambda body: read_request(body, state.limits))
    check_length(asked, state.limits)
    with state.active.hold({asked.request_id: (asked.request_id,)}, "request_id"):
        return await send_lines(request, _lines(state, asked))


async def _lines(state: ServerState, asked: ModelRequest) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(state.engine.stream(asked)) as deltas:
        async for delta in deltas:
            yield line_of(delta)


async def connect(request: web.Request) -> web.WebSocketResponse:
    """As many requests as the client likes, over one WebSocket."""
    state = request.app[STATE]
    socket = web.WebSocketResponse(max_msg_size=state.options.max_body_bytes, compress=False)
    await socket.prepare(request)
    request.app[SOCKETS].add(socket)
    connection = Connection(state, socket)
    try:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                connection.take(message.data)
    except ApiError as error:
        # What it was about cannot be told, so whoever waits for it would wait for ever.
        await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=str(error).encode()[:120])
    finally:
        await connection.end()
    return socket


async def close_sockets(app: web.Application) -> None:
    """A server that stops waits for its handlers, and these would wait for their clients."""
    sockets = app[SOCKETS]
    for socket in list(sockets):
        await socket.close(code=WSCloseCode.GOING_AWAY)


ROUTES = [web.post("/headwater/generate", generate), web.get("/headwater/connect", connect)]
