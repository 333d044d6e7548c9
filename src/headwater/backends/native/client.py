"""The client of a ``headwater serve``: control calls, and the connection for requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp

from headwater.core.errors import (
    BaseMissing,
    HeadwaterError,
    LogitsBroken,
    MemoryRefused,
    QueueFull,
    RequestError,
    RolloutFailed,
    WaitTimeout,
    WeightsError,
    WeightsIncomplete,
)
from headwater.core.new_tokens import BadFrame, NewTokens

_KINDS: dict[str, type[HeadwaterError]] = {
    "queue_full": QueueFull,
    "memory_refused": MemoryRefused,
    "logits_broken": LogitsBroken,
    "weights_refused": WeightsError,
    "weights_base_missing": BaseMissing,
    "weights_incomplete": WeightsIncomplete,
    "timeout": WaitTimeout,
}
ENGINE_FAILED = "engine_unavailable"
"""The error code of a server whose engine has failed and cannot recover."""
_NUM_CHARACTERS_SHOWN = 200


class ConnectionLost(ConnectionError):
    """The server has ended, or is about to."""


class UnreadableMessage(Exception):
    """The connection for requests delivered something that is not a valid message."""


class EngineFailed(RolloutFailed):
    """The server still answers, but its engine has failed and cannot recover."""


class FrameReceiver(Protocol):
    """Takes what arrives on the connection for requests."""

    def take(self, new: NewTokens) -> None: ...
    def refuse(self, number: int, body: Mapping[str, Any]) -> None:
        """A request has failed. ``body`` is the server's error."""
        ...


def error_of(body: Mapping[str, Any]) -> HeadwaterError:
    """The error that the server reported, as an exception of this process."""
    error = body["error"]
    usual = RequestError if error["type"] == "invalid_request_error" else RolloutFailed
    return _KINDS.get(error["code"] or "", usual)(error["message"])


class ServerClient:
    """Belongs to one event loop."""

    def __init__(self, url: str, api_key: str, heartbeat_s: float | None = None) -> None:
        """``heartbeat_s`` is for a server whose end the system may not notice: how often it is asked for a sign of life
        on the connection for requests. The connection ends if none arrives in half that time."""
        self.url = url
        self._heartbeat_s = heartbeat_s
        # No time limit here: the server limits its calls itself, and a server that has ended closes its connections.
        self._session = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST with a body, GET without."""
        method = "GET" if body is None else "POST"
        self._check_open(f"{method} {path}")
        try:
            async with self._session.request(method, path, json=body) as reply:
                status, text = reply.status, await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"{method} {path}: {type(error).__name__}: {error}") from error
        answer = _read_object(text, f"{method} {path}: the reply of status {status}")
        if "error" in answer:
            if answer["error"]["code"] == ENGINE_FAILED:
                raise EngineFailed(answer["error"]["message"])
            raise error_of(answer)
        return answer

    async def get(self, path: str) -> tuple[int, bytes]:
        """The status and the body of a reply, whatever they are."""
        self._check_open(f"GET {path}")
        try:
            async with self._session.get(path) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"GET {path}: {type(error).__name__}: {error}") from error

    async def connect(self, receiver: FrameReceiver) -> RequestLink:
        self._check_open("the connection for requests")
        try:
            # No compression and no size limit: both ends are trusted, and the connection is fast.
            socket = await self._session.ws_connect(
                "/headwater/connect", max_msg_size=0, compress=0, heartbeat=self._heartbeat_s
            )
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"the connection for requests: {error}") from error
        return RequestLink(socket, receiver)

    async def close(self) -> None:
        """Calls that come later raise ``ConnectionLost``."""
        await self._session.close()

    def _check_open(self, what: str) -> None:
        if self._session.closed:  # aiohttp would raise a RuntimeError
            raise ConnectionLost(f"{what}: its process was replaced or stopped")


class RequestLink:
    """All requests over one connection (see ``serving.native.routes``).

    One connection per request would need a file descriptor per request on both sides, which systems often limit to
    1024, and thousands of handshakes when a step starts.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, receiver: FrameReceiver) -> None:
        self._socket = socket
        self._receiver = receiver
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.known_media: set[str] = set()
        """Digests of the images and videos that were sent over this connection."""

    def post(self, message: dict[str, Any]) -> None:
        self._outbox.put_nowait(message)

    async def run(self) -> None:
        """Send posted messages and pass on what arrives until the connection ends."""
        sender = asyncio.create_task(self._send())
        try:
            async for message in self._socket:
                self._take(message)
        finally:
            sender.cancel()
            await self._socket.close()

    def _take(self, message: aiohttp.WSMessage) -> None:
        if isinstance(message.data, aiohttp.WebSocketError):  # bytes that are not a valid message
            raise UnreadableMessage(str(message.data)) from message.data
        if message.type is aiohttp.WSMsgType.BINARY:
            self._take_frame(message.data)
        elif message.type is aiohttp.WSMsgType.TEXT:
            self._take_errors(message.data)

    def _take_frame(self, frame: bytes) -> None:
        try:
            new = NewTokens.decode(frame)
        except BadFrame as error:
            raise UnreadableMessage(str(error)) from error
        self._receiver.take(new)

    def _take_errors(self, text: str) -> None:
        try:
            for line in json.loads(text):
                self._receiver.refuse(line["id"], line)
        except (ValueError, TypeError, LookupError) as error:
            shown = text[:_NUM_CHARACTERS_SHOWN]
            raise UnreadableMessage(f"{type(error).__name__}: {error}; the message: {shown}") from error

    async def _send(self) -> None:
        try:
            while True:
                await self._socket.send_str(json.dumps(await self._outbox.get()))
        except (ConnectionError, aiohttp.ClientError):
            await self._socket.close()  # also ends the reader


def _read_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, dict):
        return read
    shown = text[:_NUM_CHARACTERS_SHOWN].decode(errors="replace")
    raise RolloutFailed(f"{what} is not a JSON object: {shown!r}; please report this")
