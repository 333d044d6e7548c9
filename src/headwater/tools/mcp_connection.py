"""Connections to MCP servers: one that is started again when it dies, or one for each episode."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from headwater.core.errors import HeadwaterError
from headwater.tools.base import ToolUnavailable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
_CLOSE_LIMIT_S = 10.0
_KEPT_ERROR_BYTES = 4096


@dataclass(frozen=True)
class ServerAddress:
    """How to reach an MCP server: a command to start, or the URL of a streamable HTTP endpoint."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def connect(self, errors: _ErrorOutput) -> AsyncIterator[Any]:
        """A client of the SDK that has finished its handshake."""
        client_class, parameters_class, stdio_client, http_client = _sdk()
        if self.command:
            parameters = parameters_class(
                command=self.command, args=list(self.args), env=dict(self.env), cwd=self.cwd or None
            )
            async with client_class(stdio_client(parameters, errlog=errors.file)) as client:
                yield client
        elif self.headers:
            import httpx2  # the SDK's own HTTP client

            async with (
                httpx2.AsyncClient(headers=dict(self.headers), timeout=httpx2.Timeout(30.0, read=300.0)) as http,
                client_class(http_client(self.url, http_client=http)) as client,
            ):
                yield client
        else:
            async with client_class(self.url) as client:
                yield client


def _sdk() -> Any:
    try:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise HeadwaterError(
            f"MCP servers need the package mcp (version 2): pip install 'headwater[mcp]' ({error})"
        ) from error
    return Client, StdioServerParameters, stdio_client, streamable_http_client


class McpConnection:
    """One session with a server. A separate task holds it, because the SDK must be left in the task that entered it."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._holder = asyncio.ensure_future(self._hold())

    async def started(self, limit_s: float) -> McpConnection:
        """This connection after its handshake; ``ToolUnavailable`` if the server does not start."""
        try:
            done, _ = await asyncio.wait({self._ready}, timeout=limit_s)
        except asyncio.CancelledError:
            self._holder.cancel()
            raise
        if not done:
            await self.close()
            raise ToolUnavailable(f"MCP server {self._address.name} did not answer within {limit_s:g} s")
        if self._ready.cancelled():  # another call of the episode has given it up
            raise ToolUnavailable(f"MCP server {self._address.name} was ended while it started")
        error = self._ready.exception()
        if error is not None:
            raise ToolUnavailable(f"MCP server {self._address.name} cannot be reached: {error}") from error
        return self

    @property
    def is_alive(self) -> bool:
        return not self._holder.done()

    async def list_tools(self) -> list[Any]:
        tools: list[Any] = []
        cursor = None
        while True:
            page = await self._ready.result().list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The server's result; ``ConnectionError`` if the connection ends before it arrives."""
        call = asyncio.ensure_future(self._ready.result().call_tool(name, arguments))
        try:
            await asyncio.wait({call, self._holder}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not call.done():
            call.cancel()
            raise ConnectionError("the connection ended")
        try:
            return call.result()
        except Exception as error:
            if _is_connection_error(error):
                raise ConnectionError(str(error) or type(error).__name__) from error
            raise

    async def close(self) -> None:
        self._closing.set()
        done, _ = await asyncio.wait({self._holder}, timeout=_CLOSE_LIMIT_S)
        if not done:
            self._holder.cancel()

    async def _hold(self) -> None:
        errors = _ErrorOutput(asyncio.get_running_loop())
        try:
            async with self._address.connect(errors) as client:
                self._ready.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001  the SDK raises groups of errors
            message = _innermost(error)
            if not self._ready.done():
                self._ready.set_exception(ConnectionError(f"{message}{errors.tail()}"))
                self._ready.exception()  # asyncio would log it if no one reads it
            elif not self._closing.is_set():
                logger.warning("MCP server %s: the connection ended: %s", self._address.name, message)
        finally:
            if not self._ready.done():
                self._ready.cancel()
            errors.close()


class RestartedServer:
    """One connection for all episodes. When it breaks, it is opened again, at most ``max_restarts`` times."""

    def __init__(self, address: ServerAddress, start_timeout_s: float, max_restarts: int) -> None:
        self._address = address
        self._start_timeout_s = start_timeout_s
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._connection: McpConnection | None = None
        self._starting: asyncio.Task[McpConnection] | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        connection = await self._connected()
        try:
            return await connection.call(name, arguments)
        except ConnectionError as error:
            if connection is self._connection:
                self._restart()
            raise ToolUnavailable(f"MCP server {self._address.name}: {error}") from error

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting}, timeout=_CLOSE_LIMIT_S)
        if self._connection is not None:
            await self._connection.close()
        self._connection = self._starting = None

    async def _connected(self) -> McpConnection:
        """The open connection. Only the first start is waited for; while it is started again, calls fail at once."""
        if self._connection is not None:
            if self._connection.is_alive:
                return self._connection
            self._restart()
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start(pause_s=0.0))
        if self._num_restarts and not self._starting.done():
            raise ToolUnavailable(f"MCP server {self._address.name} is being restarted")
        return await asyncio.shield(self._starting)

    def _restart(self) -> None:
        broken, self._connection = self._connection, None
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_restarts)
        self._num_restarts += 1
        self._starting = asyncio.ensure_future(self._start(pause_s, broken))

    async def _start(self, pause_s: float, broken: McpConnection | None = None) -> McpConnection:
        if broken is not None:
            await broken.close()
        while True:
            if self._num_restarts > self._max_restarts:
                raise ToolUnavailable(
                    f"MCP server {self._address.name} was restarted {self._max_restarts} times and is gone again; "
                    "raise max_restarts, or fix the server"
                )
            await asyncio.sleep(pause_s)
            try:
                self._connection = await McpConnection(self._address).started(self._start_timeout_s)
                return self._connection
            except ToolUnavailable as error:
                logger.warning("%s", error)
                self._num_restarts += 1
                pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))


class EpisodeConnections:
    """One connection for each episode, which all tools of the server share. One that breaks is not replaced."""

    def __init__(self, address: ServerAddress, start_timeout_s: float) -> None:
        self._address = address
        self._start_timeout_s = start_timeout_s
        self._open: dict[str, tuple[McpConnection, int]] = {}

    async def acquire(self, instance_id: str) -> None:
        connection, users = self._open.get(instance_id) or (McpConnection(self._address), 0)
        self._open[instance_id] = (connection, users + 1)
        try:
            await connection.started(self._start_timeout_s)
        except BaseException:
            await asyncio.shield(self.release(instance_id))
            raise

    async def release(self, instance_id: str) -> None:
        connection, users = self._open[instance_id]
        if users > 1:
            self._open[instance_id] = (connection, users - 1)
            return
        del self._open[instance_id]
        await connection.close()

    async def call(self, instance_id: str, name: str, arguments: dict[str, Any]) -> Any:
        connection, _ = self._open[instance_id]
        try:
            if not connection.is_alive:
                raise ConnectionError("the connection ended earlier in this episode")
            return await connection.call(name, arguments)
        except ConnectionError as error:
            raise ToolUnavailable(f"MCP server {self._address.name}: {error}") from error

    async def close(self) -> None:
        for connection, _ in [*self._open.values()]:
            await connection.close()
        self._open.clear()


class _ErrorOutput:
    """The error output of a server process: a pipe of which the last bytes are kept for messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        self.file: TextIO = os.fdopen(write, "w")
        self._kept = b""
        loop.add_reader(self._read, self._receive)

    def tail(self) -> str:
        self._receive()
        lines = self._kept.decode(errors="replace").strip().splitlines()[-3:]
        return f"; its last output: {' | '.join(lines)}" if lines else ""

    def close(self) -> None:
        self._loop.remove_reader(self._read)
        os.close(self._read)
        self.file.close()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._read, 65536):
                self._kept = (self._kept + piece)[-_KEPT_ERROR_BYTES:]


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _is_connection_error(error: BaseException) -> bool:
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    if isinstance(error, MCPError):
        return bool(error.code == CONNECTION_CLOSED)
    closed = ("ClosedResourceError", "BrokenResourceError", "EndOfStream")
    return isinstance(error, OSError) or type(error).__name__ in closed or type(error).__module__.startswith("httpx")
