"""Who may ask: only pages of this server, and only with the token if there is one. And what its pages may do."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.dashboard.errors import Refused

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
_NO_TOKEN = "This dashboard needs a token. Open the address that `headwater ui` printed when it started."


@dataclass(frozen=True)
class Access:
    """``hosts`` are the values of the header Host that are accepted: a page of another site that reaches this server
    under its own name (DNS rebinding) sends another one."""

    hosts: frozenset[str]
    token: str
    cookie: str

    @classmethod
    def of(cls, host: str, port: int, token: str = "") -> Access:
        own = f"[{host}]" if ":" in host else host
        names = {own, *_LOCAL_NAMES} if own in (*_LOCAL_NAMES, "0.0.0.0", "[::]") else {own}
        return cls(frozenset(f"{name}:{port}" for name in names), token, f"headwater_token_{port}")

    def check(self, request: web.Request) -> None:
        """Raise ``Refused`` for a request from elsewhere."""
        if request.headers.get("Host", "").lower() not in self.hosts:
            raise Refused(403, "forbidden", self._wrong_address())
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            raise Refused(403, "forbidden", "Pages of other sites may not use this server.")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and (
            request.path.startswith("/api/") or request.headers.get("Sec-Fetch-Mode") != "navigate"
        ):
            raise Refused(403, "forbidden", "Pages of other sites may not use this server.")
        if self.token and not self.is_token(request.cookies.get(self.cookie, "")):
            raise Refused(401, "unauthorized", _NO_TOKEN)

    def _wrong_address(self) -> str:
        known = sorted(self.hosts)
        port = known[0].rpartition(":")[2]
        return (
            f"The address in the browser is not one of this server, which is {' or '.join(known)}. Through an SSH "
            f"tunnel, the port must be the same on both sides: ssh -L {port}:127.0.0.1:{port} MACHINE. If your machine "
            "uses this port already, start the dashboard with --port and one that is free on both."
        )

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def guard(access: Access) -> Any:
    """The outermost layer: checks every request, and turns every failure into one sentence."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if access.token and "token" in request.query and request.method == "GET":
                return _with_cookie(request, access)
            access.check(request)
            answer = await handler(request)
        except Refused as refused:
            answer = error_answer(request, refused)
        except web.HTTPException as error:
            answer = error_answer(request, _of_http(request, error))
        except HeadwaterError as error:
            answer = error_answer(request, Refused(422, "unreadable", f"{error}."))
        except OSError as error:
            name = getattr(error, "filename", None) or "A file"
            answer = error_answer(request, Refused(422, "unreadable", f"{name} cannot be read ({error.strerror})."))
        except Exception:
            logger.exception("%s: an error of the dashboard", request.path)
            message = "The dashboard made an error; the terminal in which it runs shows it. Please report it."
            answer = error_answer(request, Refused(500, "internal", message))
        if not answer.prepared:
            for name, value in _HEADERS.items():
                answer.headers.setdefault(name, value)
        return answer

    return checked


def _with_cookie(request: web.Request, access: Access) -> web.Response:
    """The first request has the token in its address. Then a cookie has it, and the address is clean."""
    if request.headers.get("Host", "").lower() not in access.hosts or not access.is_token(request.query["token"]):
        raise Refused(401, "unauthorized", _NO_TOKEN)
    left = {name: value for name, value in request.query.items() if name != "token"}
    path = request.path if request.path.startswith("/") and not request.path.startswith("//") else "/"
    answer = web.Response(
        status=303, headers={"Location": str(request.url.with_path(path).with_query(left).relative())}
    )
    # Not "Strict": the file that opens the browser (cli/ui.py) counts as another site, so the page that it leads to
    # would not get the cookie. A page of another site can still only open this one, never ask it for anything.
    answer.set_cookie(access.cookie, access.token, httponly=True, samesite="Lax", path="/")
    for name, value in _HEADERS.items():
        answer.headers.setdefault(name, value)
    return answer


def _of_http(request: web.Request, error: web.HTTPException) -> Refused:
    if error.status == 404:
        return Refused(404, "not_found", f"There is nothing at {request.path[:200]}.")
    if error.status == 405:
        return Refused(405, "bad_request", "The dashboard only reads: use GET.")
    return Refused(error.status, "bad_request", f"{error.reason}.")


def error_answer(request: web.Request, refused: Refused) -> web.StreamResponse:
    if request.path.startswith("/api/"):
        content = {"error": {"code": refused.code, "message": refused.message}}
        return web.json_response(content, status=refused.status)
    return web.Response(text=f"{refused.message}\n", status=refused.status)
