"""The application: which path is answered by whom."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from aiohttp import web

from headwater.serving import control_routes
from headwater.serving.middleware import errors_as_json, only_with_key
from headwater.serving.native import routes as native_routes
from headwater.serving.openai import routes as openai_routes
from headwater.serving.options import ServerOptions
from headwater.serving.sglang import routes as sglang_routes
from headwater.serving.state import STATE, ServerState

if TYPE_CHECKING:
    from headwater.engine.engine import Engine


def build_app(engine: Engine, options: ServerOptions) -> web.Application:
    app = web.Application(middlewares=[errors_as_json, only_with_key], client_max_size=options.max_body_bytes)
    app[STATE] = ServerState.build(engine, options)
    app[native_routes.SOCKETS] = WeakSet()
    app.on_shutdown.append(native_routes.close_sockets)
    app.add_routes([*openai_routes.ROUTES, *sglang_routes.ROUTES, *native_routes.ROUTES, *control_routes.ROUTES])
    return app
