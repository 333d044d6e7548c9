"""The calls about the servers of a router: list, add, drain, undrain, remove.

``headwater route`` has them beside the calls of every server, a run at a socket in its directory (``run_calls.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from headwater.backends.router.engine import RoutedServer, RouterEngine
from headwater.core.errors import HeadwaterError, ServerExists, ServerKept, WaitTimeout
from headwater.observe.server_changes import Change
from headwater.serving.control import in_own_thread
from headwater.serving.errors import ApiError
from headwater.serving.fields import Fields
from headwater.serving.generation import reply
from headwater.serving.reading import BODIES


def make_routes(
    router: RouterEngine,
    connect: Callable[[str], RoutedServer],
    note: Callable[[Change, str], None] = lambda change, server: None,
) -> list[web.RouteDef]:
    """``connect`` makes the engine of a running server from its address. ``note`` is told about every change."""

    joining: set[str] = set()
    """Addresses that are being added."""

    def listing() -> web.Response:
        status = router.status()
        counts = {name: int(value) for name, value in status.metrics.items()}
        return reply({"servers": [asdict(each) for each in status.servers], "version": status.version, **counts})

    async def show(request: web.Request) -> web.Response:
        return listing()

    async def add(request: web.Request) -> web.Response:
        url = await request.app[BODIES].read_control(request, _read_url)

        def connect_and_add() -> None:
            try:
                server = connect(url)
                try:
                    router.add(server)
                except BaseException:
                    server.engine.close()
                    raise
                note("add", url)
            finally:  # not when the client stops waiting: the server may be added nevertheless
                joining.remove(url)

        if url in joining or any(url in (each.name, each.url) for each in router.status().servers):
            raise ApiError(f"url = {url}: is in the router already", status=409, code="server_exists", param="url")
        joining.add(url)
        await _told(connect_and_add)
        return listing()

    async def drain(request: web.Request) -> web.Response:
        name, move = await request.app[BODIES].read_control(request, _read_name)

        def drain_and_note() -> None:
            router.drain(name, move=move)
            note("drain", name)

        await _told(drain_and_note)
        return listing()

    async def undrain(request: web.Request) -> web.Response:
        name, _ = await request.app[BODIES].read_control(request, _read_name)

        def undrain_and_note() -> None:
            router.undrain(name)
            note("undrain", name)

        await _told(undrain_and_note)
        return listing()

    async def remove(request: web.Request) -> web.Response:
        """Reply when its last request has ended or has been moved. A server that others have started keeps running."""
        name, move = await request.app[BODIES].read_control(request, _read_name)

        def remove_and_note() -> None:
            router.remove(name, move=move)
            note("remove", name)

        if router.names == (name,):
            raise ApiError(
                f"name = {name}: is the last server; add another one first", code="last_server", param="name"
            )
        await _told(remove_and_note)
        return listing()

    return [
        web.get("/servers", show),
        web.post("/servers", add),
        web.post("/servers/drain", drain),
        web.post("/servers/undrain", undrain),
        web.post("/servers/remove", remove),
    ]


async def _told(action: Callable[[], None]) -> None:
    """Run a call that may block; what is wrong with the named server is the client's error."""
    try:
        await in_own_thread(action)
    except KeyError as error:
        raise ApiError(f"name: {error.args[0]}", status=404, code="unknown_server", param="name") from error
    except ServerKept as error:
        raise ApiError(str(error), status=409, code="server_kept", param="name") from error
    except ServerExists as error:
        raise ApiError(str(error), status=409, code="server_exists", param="url") from error
    except (ApiError, WaitTimeout):
        raise
    except HeadwaterError as error:
        raise ApiError(f"the server cannot be used: {error}", status=400, code="server_unusable") from error


def _read_url(body: Mapping[str, Any]) -> str:
    fields = Fields(body)
    url = fields.text("url")
    fields.done()
    if not url or not url.startswith(("http://", "https://")):
        raise ApiError("url: must be an address such as http://127.0.0.1:8001", param="url")
    return url.rstrip("/")


def _read_name(body: Mapping[str, Any]) -> tuple[str, bool]:
    """The server, and whether other servers continue its requests."""
    fields = Fields(body)
    name, move = fields.text("name"), fields.flag("move", False)
    fields.done()
    if not name:
        raise ApiError("name: is missing; GET /servers shows the names", param="name")
    return name, move
