"""Headwater's generation calls: one request per call, or many over a WebSocket.

Messages of the WebSocket: the client sends ``{"id": 7, "request": {...}}`` to start a request and
``{"id": 7, "leave": true}`` to end one. The server sends the new tokens of all requests, and which requests have ended,
as binary frames (``core.new_tokens``), usually one per round of the engine. A request that fails is reported as text:
``[{"id": 7, "error": {...}}]``.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any, cast

from aiohttp import WSCloseCode, WSMsgType, web

from headwater.core.errors import HeadwaterError, RolloutFailed
from headwater.core.new_tokens import NewTokens
from headwater.core.protocols import Follower, InferenceEngine, RoundEngine, RoundSink
from headwater.core.requests import ModelRequest, StopReason
from headwater.serving.errors import ApiError, api_error
from headwater.serving.fields import Fields, read_object, write_json
from headwater.serving.generation import send_lines
from headwater.serving.native.request import check_length, line_of, read_request
from headwater.serving.state import STATE, ServerState

log = logging.getLogger(__name__)

SOCKETS = web.AppKey("sockets", weakref.WeakSet[web.WebSocketResponse])

_LONG_CHARACTERS = 2**17
"""A longer message takes milliseconds to read, so it is read in a thread. Most of these have images."""


class RequestSocket:
    """The requests of one WebSocket, by the client's numbers. They end when the connection closes.

    Many requests share a connection, so a rollout with thousands of requests needs one socket and one handshake. A
    frame holds everything that was generated since the last one, so a client that reads slowly gets fewer frames and
    does not slow down the engine. What waits to be sent is at most what was asked for.
    """

    def __init__(self, state: ServerState, socket: web.WebSocketResponse) -> None:
        self._state = state
        self._socket = socket
        self._names: dict[int, ExitStack] = {}
        """Per request that has not ended, its name. Closing it frees the name."""
        self._left: set[int] = set()
        """Requests that the client has left and that the engine has not ended yet."""
        self._new: list[NewTokens] = []
        self._ended: list[tuple[int, StopReason]] = []
        self._errors: list[dict[str, Any]] = []
        self._has_news = asyncio.Event()
        self._follower = follow(state.engine, self)
        self._sender = asyncio.create_task(self._send())

    async def receive(self, text: str) -> None:
        """Handle one message of the client. Raise ``ApiError`` for a message that belongs to no request.

        The client's messages are handled in their order, so the next one waits while a thread reads a long one.
        """
        if len(text) > _LONG_CHARACTERS:
            number, asked = await self._state.bodies.in_thread(lambda: self._read(text))
        else:
            number, asked = self._read(text)
        if asked is None:
            if number in self._names:
                self._left.add(number)
                self._follower.leave(number)
                self._names[number].close()
        elif number in self._names:
            raise ApiError(f"id = {number}: a request with this number has not ended; use another number")
        elif isinstance(asked, Exception):
            self.failed(number, asked)
        else:
            self._enter(number, asked)

    async def end(self) -> None:
        """End all requests, because the client has disconnected."""
        self._sender.cancel()
        for number, name in self._names.items():
            self._follower.leave(number)
            name.close()
        self._names.clear()
        await asyncio.gather(self._sender, return_exceptions=True)

    def _read(self, text: str) -> tuple[int, ModelRequest | Exception | None]:
        """The number of a message with its request, or with the error of a wrong one; None if the client leaves it."""
        fields = Fields(read_object(text.encode()))
        number, body, leave = fields.optional_integer("id"), fields.mapping("request"), fields.flag("leave", False)
        fields.done()
        if number is None or not 0 <= number < 2**63 or leave == (body is not None):
            raise ApiError('a message is {"id": number, "request": {...}} or {"id": number, "leave": true}')
        if body is None:
            return number, None
        try:
            return number, read_request(body, self._state.limits, self._state.media)
        except Exception as error:  # noqa: BLE001  the client of this request is told, and the others are served
            return number, error

    def _enter(self, number: int, request: ModelRequest) -> None:
        try:
            self._state.check_given_tokens(request)
            self._follower.enter(number, request)
        except Exception as error:  # noqa: BLE001  the client of this request is told, and the others are served
            self.failed(number, error)
        else:
            # Shared: a trainer names a request after its prompt, which may run twice, and a client may reconnect before
            # the server has noticed that it was gone.
            name, self._names[number] = request.request_id, ExitStack()
            self._names[number].enter_context(self._state.active.share({name: (name,)}))

    # What the engine tells

    def take(self, new: NewTokens) -> None:
        self._new.append(new)
        self._has_news.set()

    def ended(self, number: int, reason: StopReason) -> None:
        if not self._forget(number):
            self._ended.append((number, reason))
            self._has_news.set()

    def failed(self, number: int, error: Exception) -> None:
        if self._forget(number):
            return
        if isinstance(error, HeadwaterError):
            told = api_error(error)
        else:  # the client gets a short message, the log the traceback
            log.error("request %d of a connection failed", number, exc_info=error)
            told = ApiError("internal error; see the server's log", status=500, code="internal_error")
        self._errors.append({"id": number, **told.body()})
        self._has_news.set()

    def _forget(self, number: int) -> bool:
        """Release the name of a request that has ended. Return whether its client had left."""
        name = self._names.pop(number, None)
        if name is not None:
            name.close()
        had_left = number in self._left
        self._left.discard(number)
        return had_left

    async def _send(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            new, ended, errors = self._new, self._ended, self._errors
            self._new, self._ended, self._errors = [], [], []
            if new or ended:
                await self._socket.send_bytes(NewTokens.join(new, ended).encode())
            if errors:
                await self._socket.send_str(write_json(errors).decode())


async def generate(request: web.Request) -> web.StreamResponse:
    """One request. Its tokens are sent line by line as they are generated."""
    state = request.app[STATE]
    asked = await state.read(request, lambda body: read_request(body, state.limits, state.media))
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
    connection = RequestSocket(state, socket)
    try:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await connection.receive(message.data)
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


def follow(engine: InferenceEngine, sink: RoundSink) -> Follower:
    """Requests whose new tokens are passed to ``sink``: all together if the engine can do that, or stream by stream."""
    if engine.capabilities.rounds:
        return cast(RoundEngine, engine).follow(sink)
    return StreamFollower(engine, sink)


class StreamFollower:
    """One task per request. Belongs to one event loop."""

    def __init__(self, engine: InferenceEngine, sink: RoundSink) -> None:
        self._engine = engine
        self._sink = sink
        self._tasks: dict[int, asyncio.Task[StopReason]] = {}

    def enter(self, number: int, request: ModelRequest) -> None:
        task = self._tasks[number] = asyncio.create_task(self._run(number, request))
        # Not at the end of the task itself: one that is cancelled before it has started does not run at all.
        task.add_done_callback(lambda _: self._end(number))

    def leave(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()

    async def _run(self, number: int, request: ModelRequest) -> StopReason:
        async with aclosing(self._engine.astream(request)) as deltas:
            async for delta in deltas:
                if delta.tokens:
                    self._sink.take(NewTokens.of_delta(number, delta))
                if delta.stop_reason is not None:
                    return delta.stop_reason
        raise RolloutFailed(f"request {request.request_id}: the engine's stream has no end; its last part needs one")

    def _end(self, number: int) -> None:
        task = self._tasks.pop(number)
        if task.cancelled():
            self._sink.ended(number, "abort")
        elif isinstance(error := task.exception(), Exception):
            self._sink.failed(number, error)
        else:
            self._sink.ended(number, task.result())
