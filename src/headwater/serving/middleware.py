"""What stands around every handler: errors as JSON, and who may call."""

from __future__ import annotations

import difflib
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.serving import json_body
from headwater.serving.errors import ApiError, api_error
from headwater.serving.state import STATE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""What load balancers and orchestrators ask, without a key."""


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except HeadwaterError as error:
        return _refusal(api_error(error))
    except web.HTTPException as error:
        return _refusal(_http_error(request, error))
    except ConnectionError:
        raise  # nobody is there to answer
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _refusal(ApiError("internal error; the server's log has it", status=500, code="internal_error"))


@web.middleware
async def only_with_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[STATE].options.api_key
    if request.path in OPEN_PATHS:
        return await handler(request)
    if not key:
        # Any web page that the user opens may send requests to this machine; programs send no Origin.
        if "Origin" in request.headers:
            raise ApiError(
                "requests from web pages need a key; start the server with --api-key", status=403, code="web_page"
            )
        return await handler(request)
    given = request.headers.get("Authorization", "")
    # Bytes, because compare_digest takes only ASCII text; a header may hold anything.
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


def _refusal(error: ApiError) -> web.Response:
    return web.Response(
        body=json_body.write(error.body()),
        status=error.status,
        headers=error.headers,
        content_type="application/json",
    )


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals in our shape."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods - {"HEAD"}))
        return ApiError(
            f"{request.method} {request.path}: wrong method; use {allowed}",
            status=405,
            code="wrong_method",
            headers={"Allow": error.headers["Allow"]},
        )
    if isinstance(error, web.HTTPNotFound):
        return ApiError(f"{request.path}: no such path; {_hint(request)}", status=404, code="unknown_path")
    return ApiError(error.reason, status=error.status, code="http_error")


def _hint(request: web.Request) -> str:
    paths = sorted({resource.canonical for resource in request.app.router.resources()})
    close = difflib.get_close_matches(request.path[:100], paths, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known paths: {', '.join(paths)}"
