"""Lets ``headwater servers`` list, add, drain and remove the servers of a run, over a socket in the run directory.

with RunCalls(run, router, connect):
    trainer.fit()
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal

from aiohttp import web

from headwater.backends.router.engine import RoutedServer, RouterEngine
from headwater.backends.router.routes import make_routes
from headwater.core.errors import HeadwaterError
from headwater.observe.run_directory import RunDirectory
from headwater.observe.run_socket import listening
from headwater.observe.server_changes import Change, ServerChange
from headwater.serving.app import errors_as_json
from headwater.serving.listen import SHUTDOWN_S, make_runner
from headwater.serving.options import ServerOptions
from headwater.serving.reading import BODIES, BodyReader

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 2**16
_BODY_LIMIT_S = 10.0
_END_LIMIT_S = 4 * SHUTDOWN_S
_DONE = {
    "add": "was added",
    "drain": "gets no more requests",
    "undrain": "gets requests again",
    "remove": "was removed",
}


class RunCalls:
    """Takes calls within the block. A run that cannot have a socket continues without, and a warning says why."""

    def __init__(self, run: RunDirectory, router: RouterEngine, connect: Callable[[str], RoutedServer]) -> None:
        """``connect`` makes the engine of a server that is to join, if the run can use it."""
        self._run = run
        self._router = router
        self._routes = make_routes(router, connect, self._note)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._held = ExitStack()

    def __enter__(self) -> RunCalls:
        try:
            taken = self._held.enter_context(listening(self._run.servers_socket))
        except OSError as error:
            self._loop.close()
            logger.warning(
                "%s: no socket can be made there (%s), so the servers cannot be changed while the run runs",
                *(self._run.path, error),
            )
            return self
        self._record("start", self._router.names)
        self._thread = threading.Thread(target=self._serve, args=(taken,), name="headwater-run-calls", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_END_LIMIT_S)
        self._held.close()

    def _serve(self, taken: socket.socket) -> None:
        try:
            self._loop.run_until_complete(self._answer(taken))
        except Exception:
            logger.exception("the servers of the run cannot be changed any more")
        finally:
            self._loop.close()

    async def _answer(self, taken: socket.socket) -> None:
        app = web.Application(middlewares=[errors_as_json], client_max_size=_MAX_BODY_BYTES)
        bodies = app[BODIES] = BodyReader(max_bytes=_MAX_BODY_BYTES, limit_s=_BODY_LIMIT_S)
        app.add_routes(self._routes)
        runner = make_runner(app, ServerOptions("servers"))
        await runner.setup()
        try:
            await web.SockSite(runner, taken).start()
            await self._stop.wait()
        finally:
            await runner.cleanup()
            bodies.close()

    def _note(self, change: Change, server: str) -> None:
        logger.warning("server %s %s, by `headwater servers`", server, _DONE[change])
        self._record(change, [server])

    def _record(self, kind: Change | Literal["start"], servers: Sequence[str]) -> None:
        """The change itself has been made, so a line that cannot be written is only a warning."""
        try:
            self._run.append_server_change(ServerChange.now(kind, self._router.get_version(), servers).to_json())
        except (OSError, HeadwaterError) as error:
            logger.warning("%s cannot be written: %s", self._run.servers_file, error)
