"""The web application: routes to answers, the page, events and exports; and serving it until a signal arrives."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.dashboard.answers import Answers
from headwater.dashboard.assets import INDEX, Asset, Assets
from headwater.dashboard.engine_view import server_states
from headwater.dashboard.errors import Refused, not_found
from headwater.dashboard.events import STOPPING, stream
from headwater.dashboard.export import export
from headwater.dashboard.guard import Access, guard
from headwater.dashboard.pictures import picture
from headwater.dashboard.plain_values import encoded
from headwater.dashboard.runs import Runs

_NUM_THREADS = 4
_MAX_WAITING = 64
_COMPRESS_BYTES = 16 << 10
_SHUTDOWN_S = 1.0
SERVER_KEY = "HEADWATER_SERVER_KEY"
"""The environment variable with the key of the servers of ``--server``."""

T = TypeVar("T")


class Dashboard:
    """Serves the runs of a place."""

    def __init__(self, runs: Runs, access: Access, servers: tuple[str, ...] = (), assets: Assets | None = None) -> None:
        self._runs = runs
        self._access = access
        self._servers = servers
        self._assets = assets or Assets()
        self._answers = Answers(runs, servers)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dashboard")
        self._waiting = 0
        self._is_stopping = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[guard(self._access)])
        app[STOPPING] = asyncio.Event()
        app.add_routes(
            [
                web.get("/api/info", self._plain(self._answers.info)),
                web.get("/api/runs", self._plain(self._answers.listing)),
                web.get("/api/diff", self._difference),
                web.get("/api/servers", self._server_states),
                web.get("/api/events", self._events),
                web.get("/api/runs/{run}", self._about_run),
                web.get("/api/runs/{run}/events", self._events),
                web.get("/api/runs/{run}/export", self._export),
                web.get("/api/runs/{run}/media", self._picture),
                web.get("/api/runs/{run}/{what}", self._about_run),
                web.get("/assets/{name:.+}", self._asset),
                web.get("/{path:.*}", self._page),
            ]
        )
        app.on_shutdown.append(self._stop)
        return app

    async def _stop(self, app: web.Application) -> None:
        app[STOPPING].set()
        self._is_stopping = True
        self._runs.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work`` in a thread. Few wait at a time, so that a page that asks too often cannot stop the others."""
        if self._is_stopping:
            raise Refused(503, "stopping", "The dashboard is being stopped.")
        if self._waiting >= _MAX_WAITING:
            raise Refused(503, "busy", "Too many requests wait for an answer. Try again in a moment.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args))
        finally:
            self._waiting -= 1

    async def _json(self, work: Callable[..., Any], *args: Any) -> web.Response:
        text = await self._call(lambda: encoded(work(*args)))
        answer = web.Response(body=text, content_type="application/json", charset="utf-8")
        if len(text) > _COMPRESS_BYTES:
            answer.enable_compression()
        return answer

    def _plain(self, work: Callable[[], dict[str, Any]]) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            return await self._json(work)

        return handler

    async def _about_run(self, request: web.Request) -> web.Response:
        name, what = request.match_info["run"], request.match_info.get("what", "")
        if what not in self._answers.about_run or (what == "" and "what" in request.match_info):
            raise not_found(f"There is nothing at {request.path[:200]}.")
        return await self._json(self._answers.of_run, name, what, dict(request.query))

    async def _difference(self, request: web.Request) -> web.Response:
        return await self._json(self._answers.difference, dict(request.query))

    async def _server_states(self, request: web.Request) -> web.Response:
        states = await server_states(self._servers, os.environ.get(SERVER_KEY, ""))
        return web.Response(body=encoded(states), content_type="application/json", charset="utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await stream(request, self._runs, request.match_info.get("run"), self._call, self._answers.state)

    async def _export(self, request: web.Request) -> web.Response:
        name, id = request.match_info["run"], request.query.get("id") or None
        text = await self._call(export, self._answers, self._assets, name, id)
        file = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{name}{f'-{id}' if id else ''}.html")
        headers = {"Content-Disposition": f"attachment; filename=\"{file}\"; filename*=UTF-8''{quote(file)}"}
        return web.Response(body=text.encode(), content_type="text/html", charset="utf-8", headers=headers)

    async def _picture(self, request: web.Request) -> web.Response:
        run = self._runs.get(request.match_info["run"])
        found = await self._call(picture, run, dict(request.query))
        headers = {"Cache-Control": "private, max-age=86400, immutable"}  # its address names its content
        return web.Response(body=found.content, content_type=found.content_type, headers=headers)

    async def _asset(self, request: web.Request) -> web.Response:
        found = self._assets.files.get(request.match_info["name"])
        if found is None:
            raise not_found(f"There is nothing at {request.path[:200]}.")
        return _file(found)

    async def _page(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        if path == "api" or path.startswith("api/") or "." in path.rpartition("/")[2]:
            raise not_found(f"There is nothing at {request.path[:200]}.")
        return _file(self._assets.files[INDEX])


def _file(asset: Asset) -> web.Response:
    answer = web.Response(body=asset.content, headers={"Content-Type": asset.content_type})
    if len(asset.content) > _COMPRESS_BYTES:
        answer.enable_compression()
    return answer


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
