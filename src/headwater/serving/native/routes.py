"""Headwater's generation calls: one request per call, or many over a WebSocket.

Messages of the WebSocket: the client sends ``{"id": 7, "request": {...}}`` to start a request and
``{"id": 7, "leave": true}`` to end one. The server sends lists of
``{"id": 7, "tokens": [...], "logprobs": [...], "versions": [...]}``, where the last entry of an id has a
``stop_reason``, or ``{"id": 7, "error": {...}}``. Everything generated since the last message is sent as one list.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from headwater.core.errors import HeadwaterError
from headwater.core.records import ModelRequest
from headwater.serving.errors import ApiError, api_error
from headwater.serving.fields import Fields, read_object, write_json
from headwater.serving.generation import send_lines
from headwater.serving.native.request import check_length, line_of, read_request
from headwater.serving.state import STATE, ServerState

log = logging.getLogger(__name__)

SOCKETS = web.AppKey("sockets", weakref.WeakSet[web.WebSocketResponse])


class Connection:
    """The requests of one WebSocket, by the client's numbers. They end when the connection closes.

    Many requests share a connection, so a rollout with thousands of requests needs one socket and one handshake.
    """

    def __init__(self, state: ServerState, socket: web.WebSocketResponse) -> None:
        self._state = state
        self._socket = socket
        self._running: dict[int, asyncio.Task[None]] = {}
        # Unbounded: it holds at most the requested tokens, and a slow client must not slow down the engine.
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send())

    def take(self, text: str) -> None:
        """Handle one message of the client. Raise ``ApiError`` for a message that belongs to no request."""
        fields = Fields(read_object(text.encode()))
        number, body, leave = fields.optional_integer("id"), fields.mapping("request"), fields.flag("leave", False)
        fields.done()
        if number is None or leave == (body is not None):
            raise ApiError('a message is {"id": number, "request": {...}} or {"id": number, "leave": true}')
        if body is None:
            running = self._running.pop(number, None)
            if running is not None:
                running.cancel()
        elif number in self._running:
            raise ApiError(f"id = {number}: a request with this number is running; use another number")
        else:
            self._running[number] = asyncio.create_task(self._run(number, body))

    async def end(self) -> None:
        """End all requests, because the client has disconnected."""
        tasks = [self._sender, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, number: int, body: Mapping[str, Any]) -> None:
        try:
            request = read_request(body, self._state.limits)
            self._state.check_given_tokens(request)
            name = request.request_id
            # Shared: a trainer names a request after its prompt, which may run twice, and a client may reconnect before
            # the server has noticed that it was gone.
            with self._state.active.share({name: (name,)}):
                async with aclosing(self._state.engine.astream(request)) as deltas:
                    async for delta in deltas:
                        self._outbox.put_nowait({"id": number, **line_of(delta)})
        except HeadwaterError as error:
            self._outbox.put_nowait({"id": number, **api_error(error).body()})
        except Exception:  # the client gets a short message, the log the traceback
            log.exception("request %s failed", body.get("request_id"))
            unknown = ApiError("internal error; see the server's log", status=500, code="internal_error")
            self._outbox.put_nowait({"id": number, **unknown.body()})
        finally:
            if self._running.get(number) is asyncio.current_task():
                del self._running[number]

    async def _send(self) -> None:
        while True:
            lines = [await self._outbox.get()]
            while not self._outbox.empty():
                lines.append(self._outbox.get_nowait())
            await self._socket.send_str(write_json(lines).decode())


async def generate(request: web.Request) -> web.StreamResponse:
    """One request. Its tokens are sent line by line as they are generated."""
    state = request.app[STATE]
    asked = await state.read(request, lambda body: read_request(body, state.limits))
    check_length(asked, state.limits)
    state.check_given_tokens(asked)
    with state.active.hold({asked.request_id: (asked.request_id,)}, "request_id"):
        return await send_lines(request, _lines(state, asked))


async def _lines(state: ServerState, asked: ModelRequest) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(state.engine.astream(asked)) as deltas:
        async for delta in deltas:
            yield line_of(delta)


async def connect(request: web.Request) -> web.WebSocketResponse:
    """Any number of requests over one WebSocket."""
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
        # The request cannot be identified, so its caller would wait forever if the connection stayed open.
        await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=str(error).encode()[:120])
    finally:
        await connection.end()
    return socket


async def close_sockets(app: web.Application) -> None:
    """Close the connections when the server stops. Otherwise their handlers would wait for the clients."""
    sockets = app[SOCKETS]
    for socket in list(sockets):
        await socket.close(code=WSCloseCode.GOING_AWAY)


ROUTES = [web.post("/headwater/generate", generate), web.get("/headwater/connect", connect)]
