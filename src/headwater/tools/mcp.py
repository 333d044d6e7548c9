"""``mcp``: the tools of MCP servers, over stdio or streamable HTTP, through the official SDK."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from headwater.config.constraints import AtLeast, MoreThan
from headwater.core.errors import ConfigError
from headwater.core.registry import nearest
from headwater.tools import TOOLS
from headwater.tools.base import BaseTool, ToolError, ToolResponse
from headwater.tools.mcp_connection import EpisodeConnections, McpConnection, RestartedServer, ServerAddress
from headwater.tools.results import BadResult

_KEYS = ("command", "args", "env", "cwd", "url", "headers", "auth_token", "type", "transport")
_TRANSPORTS = {"stdio": "command", "http": "url", "streamablehttp": "url"}
"""What ``type`` or ``transport`` may be, without hyphens and underscores, and the key that belongs to it."""
_INVALID = re.compile(r"[^A-Za-z0-9_.-]")


@TOOLS.register
class McpServers:
    """A source of tools: all tools of one or several servers, or those that ``tools`` names.

    ``servers`` maps names to settings as in the usual ``mcpServers`` files; for one server, ``command`` or ``url`` is
    enough. ``sessions="shared"`` uses one connection for all episodes, and ``"episode"`` a new one for each, which a
    server with state needs.
    """

    def __init__(
        self,
        *,
        servers: Mapping[str, Any] | None = None,
        command: str = "",
        args: tuple[str, ...] = (),
        env: Mapping[str, Any] | None = None,
        cwd: str = "",
        url: str = "",
        headers: Mapping[str, Any] | None = None,
        tools: tuple[str, ...] = (),
        sessions: Literal["shared", "episode"] = "shared",
        prefix: bool = False,
        max_restarts: Annotated[int, AtLeast(0)] = 10,
        start_timeout_s: Annotated[float, MoreThan(0)] = 30.0,
    ) -> None:
        one = {"command": command, "args": args, "env": env, "cwd": cwd, "url": url, "headers": headers}
        given = {key: value for key, value in one.items() if value}
        if bool(given) == bool(servers):
            raise ConfigError(["give either servers, or command or url of one server"])
        self._addresses = [_address(name, entry) for name, entry in (servers or {"mcp": given}).items()]
        self._tools = tools
        self._sessions = sessions
        self._prefix = prefix
        self._max_restarts = max_restarts
        self._start_timeout_s = start_timeout_s
        self._open: list[RestartedServer | EpisodeConnections] = []

    async def list_tools(self) -> list[BaseTool]:
        """Ask every server for its tools. The connections of the run are opened later, on its own event loop."""
        found: list[BaseTool] = []
        listed: list[str] = []
        for address in self._addresses:
            offered = await _ask(address, self._start_timeout_s)
            listed += [each.name for each in offered]
            server = self._server(address)
            self._open.append(server)
            prefix = f"{address.name}_" if self._prefix else ""
            chosen = [each for each in offered if not self._tools or each.name in self._tools]
            found += [_make(server, each, prefix) for each in chosen]
        missing = [name for name in self._tools if name not in listed]
        if missing:
            raise ConfigError([f"tools = {missing}: no server has these; {nearest(missing[0], listed)}"])
        return found

    async def close(self) -> None:
        for server in self._open:
            await server.close()

    def _server(self, address: ServerAddress) -> RestartedServer | EpisodeConnections:
        if self._sessions == "episode":
            return EpisodeConnections(address, self._start_timeout_s)
        return RestartedServer(address, self._start_timeout_s, self._max_restarts)


async def _ask(address: ServerAddress, limit_s: float) -> list[Any]:
    connection = await McpConnection(address).started(limit_s)
    try:
        return await connection.list_tools()
    finally:
        await connection.close()


def _address(name: str, entry: Any) -> ServerAddress:
    if not isinstance(entry, Mapping):
        raise ConfigError([f"servers.{name} = {entry!r}: must be a mapping with command or url"])
    for key in entry:
        if key not in _KEYS:
            raise ConfigError([f"servers.{name}.{key}: no such key; {nearest(key, [*_KEYS])}"])
    if bool(entry.get("command")) == bool(entry.get("url")):
        raise ConfigError([f"servers.{name}: give either command or url"])
    for key in ("type", "transport"):
        _check_transport(entry, key, f"servers.{name}.{key}")
    headers = _texts(entry.get("headers"), f"servers.{name}.headers")
    if entry.get("auth_token"):
        headers = {**headers, "Authorization": f"Bearer {entry['auth_token']}"}
    args = entry.get("args") or ()
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ConfigError([f"servers.{name}.args = {args!r}: must be a list"])
    return ServerAddress(
        name=name,
        command=str(entry.get("command") or ""),
        args=tuple(str(each) for each in args),
        env=_texts(entry.get("env"), f"servers.{name}.env"),
        cwd=str(entry.get("cwd") or ""),
        url=str(entry.get("url") or ""),
        headers=headers,
    )


def _check_transport(entry: Mapping[str, Any], key: str, place: str) -> None:
    value = entry.get(key)
    if value is None:
        return
    wanted = _TRANSPORTS.get(re.sub("[-_]", "", str(value)).lower())
    if wanted is None:
        raise ConfigError(
            [f"{place} = {value!r}: not supported; use stdio with a command, or streamable-http with the server's "
             "URL for streamable HTTP, which often ends with /mcp"]
        )  # fmt: skip
    if not entry.get(wanted):
        raise ConfigError([f"{place} = {value!r}: needs {wanted}; remove {key}, or give {wanted}"])


def _texts(value: Any, key: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError([f"{key} = {value!r}: must be a mapping of names to text"])
    return {str(name): str(each) for name, each in value.items()}


def _make(server: RestartedServer | EpisodeConnections, offered: Any, prefix: str) -> BaseTool:
    schema = {
        "name": _INVALID.sub("_", f"{prefix}{offered.name}")[:64],
        "description": offered.description or "",
        "parameters": offered.input_schema,
    }
    if isinstance(server, EpisodeConnections):
        return _EpisodeTool(server, offered.name, schema)
    return _SharedTool(server, offered.name, schema)


class _SharedTool(BaseTool):
    def __init__(self, server: RestartedServer, name: str, schema: Mapping[str, Any]) -> None:
        super().__init__(tool_schema=schema)
        self._server = server
        self._remote_name = name

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return _response(await self._server.call(self._remote_name, parameters))


class _EpisodeTool(BaseTool):
    def __init__(self, server: EpisodeConnections, name: str, schema: Mapping[str, Any]) -> None:
        super().__init__(tool_schema=schema)
        self._server = server
        self._remote_name = name

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await self._server.acquire(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return _response(await self._server.call(instance_id, self._remote_name, parameters))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._server.release(instance_id)


def _response(result: Any) -> ToolResponse:
    """The text and images of a result. An error of the server's tool becomes ``ToolError``."""
    texts = [block.text for block in result.content if getattr(block, "type", "") == "text"]
    images = [f"data:;base64,{block.data}" for block in result.content if getattr(block, "type", "") == "image"]
    others = sorted({str(getattr(block, "type", "?")) for block in result.content} - {"text", "image"})
    if result.is_error:
        raise ToolError("\n".join(texts) or "the tool failed")
    if others and not texts and not images:
        raise BadResult(f"returned only {', '.join(others)}; results can only be text and images")
    return ToolResponse("\n".join(texts), image=images or None)
