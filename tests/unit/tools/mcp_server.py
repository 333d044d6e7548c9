"""An MCP server for tests: ``python mcp_server.py`` over stdio, or ``python mcp_server.py PORT`` over HTTP."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Picture

server = MCPServer("shop")
_counter = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def count(by: int = 1) -> str:
    """Add to a counter of this server."""
    global _counter
    _counter += by
    return str(_counter)


@server.tool()
def fail(kind: Literal["raise", "die", "hang"]) -> str:
    """Fail in one of several ways."""
    if kind == "die":
        os._exit(3)
    if kind == "hang":
        time.sleep(3600)
    raise ValueError("this tool always fails")


@server.tool()
def process_id() -> str:
    """The process id of the server."""
    return str(os.getpid())


@server.tool()
def show(color: str) -> list:
    """A picture, and what it shows."""
    stream = io.BytesIO()
    Picture.new("RGB", (4, 4), color).save(stream, "png")
    return [f"All {color}.", Image(data=stream.getvalue(), format="png")]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
