"""Running the dashboard: bind the port, serve until a signal arrives, stop."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable
from urllib.parse import quote

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.dashboard.app import Dashboard
from headwater.dashboard.guard import Access
from headwater.dashboard.runs import Runs

_SHUTDOWN_S = 1.0


def bind(host: str, port: int) -> socket.socket:
    """Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.listen(128)
    except (OSError, OverflowError) as error:
        taken.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise HeadwaterError(
                f"--port = {port}: {host}:{port} is in use; use another port, or 0 for any free one"
            ) from error
        raise HeadwaterError(f"--port = {port}: cannot listen at {host}:{port} ({error})") from error
    return taken


def serve(runs: Runs, taken: socket.socket, token: str, servers: tuple[str, ...], ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. ``ready`` is called with the address to open."""
    asyncio.run(_serve(runs, taken, token, servers, ready))


async def _serve(
    runs: Runs, taken: socket.socket, token: str, servers: tuple[str, ...], ready: Callable[[str], None]
) -> None:
    host, port = taken.getsockname()[:2]
    dashboard = Dashboard(runs, Access.of(host, port, token), servers)
    runner = web.AppRunner(dashboard.app(), shutdown_timeout=_SHUTDOWN_S, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, taken).start()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop.set)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else ""))
        await stop.wait()
    finally:
        await runner.cleanup()
