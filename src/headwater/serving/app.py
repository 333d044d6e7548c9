"""The aiohttp application: its routes, and the error handling and authentication around every handler."""

from __future__ import annotations

import difflib
import hmac
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from weakref import WeakSet

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.core.media import MediaProcessor
from headwater.core.protocols import InferenceEngine, Tokenizer
from headwater.serving import control_routes, weight_group, weight_stream
from headwater.serving.errors import ApiError, api_error, cut
from headwater.serving.fields import write_json
from headwater.serving.native import routes as native_routes
from headwater.serving.openai import routes as openai_routes
from headwater.serving.options import ServerOptions
from headwater.serving.reading import BODIES
from headwater.serving.sglang import distributed as sglang_distributed
from headwater.serving.sglang import routes as sglang_routes
from headwater.serving.state import STATE, ServerState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""Paths that load balancers and orchestrators may call without a key."""


def build_app(
    engine: InferenceEngine,
    tokenizer: Tokenizer,
    options: ServerOptions,
    routes: Iterable[web.RouteDef] = (),
    processor: MediaProcessor | None = None,
) -> web.Application:
    """``routes`` are further calls beside those that every server has. ``processor`` is for chats with images."""
    app = web.Application(middlewares=[errors_as_json, only_with_key], client_max_size=options.max_body_bytes)
    app[STATE] = ServerState.build(engine, tokenizer, options, processor)
    app[BODIES] = app[STATE].bodies
    app[native_routes.SOCKETS] = WeakSet()
    app[weight_stream.INCOMING] = weight_stream.IncomingWeights()
    app[sglang_distributed.GROUPS] = {}
    app[sglang_distributed.OPEN] = []
    app[weight_group.MEMBERSHIP] = weight_group.Membership()
    app.on_shutdown.append(native_routes.close_sockets)
    app.on_cleanup.extend((_leave_groups, _end_threads))
    app.add_routes([*openai_routes.ROUTES, *sglang_routes.ROUTES, *native_routes.ROUTES, *control_routes.ROUTES])
    app.add_routes([*weight_stream.ROUTES, *weight_group.ROUTES, *sglang_distributed.ROUTES, *routes])
    return app


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except HeadwaterError as error:
        return _refusal(api_error(error))
    except web.HTTPException as error:
        return _refusal(_http_error(request, error))
    except ConnectionError:
        raise  # the client has disconnected
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _refusal(ApiError("internal error; see the server's log", status=500, code="internal_error"))


@web.middleware
async def only_with_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[STATE].options.api_key
    if request.path in OPEN_PATHS:
        return await handler(request)
    if not key:
        _refuse_web_pages(request)
        return await handler(request)
    given = request.headers.get("Authorization", "")
    # Bytes, because compare_digest accepts only ASCII text and a header may contain anything.
    expected = f"Bearer {key}".encode()
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected):
        what = "no API key was sent" if not given else "wrong API key"
        raise ApiError(
            f"{what}; send the header 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return await handler(request)


def _refuse_web_pages(request: web.Request) -> None:
    """Any web page that the user opens can send requests to this machine. A server without a key refuses them."""
    # Programs send no Origin header.
    if "Origin" in request.headers:
        raise ApiError(
            "requests from web pages need a key; start the server with --api-key", status=403, code="web_page"
        )
    # A page can let its own name point to this machine (DNS rebinding). Its requests then have no Origin header.
    host = request.headers.get("Host", "")
    if host and not is_own_host(host, request.app[STATE].options.allowed_hosts):
        raise ApiError(
            f"Host = {cut(host)}: is not a name of this machine; use its IP address, or start the server with "
            "--allowed-host NAME or with --api-key",
            status=403,
            code="unknown_host",
        )


def is_own_host(host: str, allowed: Sequence[str]) -> bool:
    """Whether a ``Host`` header can only come from a client that was given an address or name of this machine."""
    name = _name_of_host(host)
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        own = {"localhost", socket.gethostname().lower(), *(each.lower().rstrip(".") for each in allowed)}
        return name in own or name.endswith(".localhost") or "*" in own
    return True  # a web page cannot make its name an address


def _name_of_host(host: str) -> str:
    """``localhost`` of ``LocalHost.:8000``, and ``::1`` of ``[::1]:8000``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


async def _leave_groups(app: web.Application) -> None:
    """End the threads of the weight groups. They would continue if the process runs longer than the server."""
    app[weight_group.MEMBERSHIP].leave()
    for link in app[sglang_distributed.GROUPS].values():
        link.close()
    app[sglang_distributed.GROUPS].clear()


async def _end_threads(app: web.Application) -> None:
    app[STATE].bodies.close()


def _refusal(error: ApiError) -> web.Response:
    return web.Response(
        body=write_json(error.body()),
        status=error.status,
        headers=error.headers,
        content_type="application/json",
    )


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """An error of aiohttp in our format."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        return ApiError(
            f"{cut(request.method)} {cut(request.path)}: wrong method; use {allowed}",
            status=405,
            code="wrong_method",
            headers={"Allow": error.headers["Allow"]},
        )
    if isinstance(error, web.HTTPNotFound):
        return ApiError(f"{cut(request.path)}: no such path; {_hint(request)}", status=404, code="unknown_path")
    return ApiError(error.reason, status=error.status, code="http_error")


def _hint(request: web.Request) -> str:
    paths = sorted({resource.canonical for resource in request.app.router.resources()})
    close = difflib.get_close_matches(request.path[:100], paths, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known paths: {', '.join(paths)}"
