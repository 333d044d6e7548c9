"""The HTTP server of all episodes of a run: one port, one secret path per episode.

    server = await EndpointServer.here(host, port)
    async with server.session(episode, rules) as session:
        ...                                    # the agent calls server.base_url(session)

It runs on the event loop of the episodes, starts with the first episode, and stops when the loop cancels its tasks.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from headwater.core.errors import ConfigError, HeadwaterError
from headwater.serving.app import errors_as_json
from headwater.serving.errors import ApiError, cut, wrong
from headwater.serving.fields import read_object
from headwater.serving.generation import reply, send_events
from headwater.serving.listen import BACKLOG, bind, make_runner
from headwater.serving.openai.responses import event_bytes
from headwater.serving.options import DEFAULT_MAX_BODY_MIB, ServerOptions
from headwater.serving.reading import BodyReader
from headwater.workflows.agents.api import CHAT, RESPONSES, answer_call
from headwater.workflows.agents.session import Session, SessionRules, episode_ended
from headwater.workflows.episode import Episode

log = logging.getLogger(__name__)

MODEL_NAME = "default"
"""The model's name in replies to clients that send none. Every name is accepted."""
_NUM_ENDED = 65_536
"""How many ended episodes are remembered, so that a late call is told that it is late."""
_SLOW_BYTES = 2**16
"""A longer body takes milliseconds to parse, so it is parsed in a thread."""
_OTHER_APIS = ("completions", "embeddings", "messages")
"""They are refused with a hint."""


class EndpointServer:
    """Use ``here`` to get the server of the running event loop."""

    def __init__(self, host: str, port: int, public_url: str) -> None:
        self.refusals: Counter[str] = Counter()
        """Calls that belong to no running episode, by the code of their error."""
        self._taken: Counter[str] = Counter()
        """``refusals`` when they were last taken."""
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._socket = _bind(host, port)
        bound_host, bound_port = self._socket.getsockname()[:2]
        address = f"[{bound_host}]" if ":" in bound_host else bound_host
        self._url = (public_url or f"http://{address}").rstrip("/")
        if not public_url or _lacks_port(public_url):
            self._url += f":{bound_port}"
        options = ServerOptions(MODEL_NAME)
        self._bodies = BodyReader(max_bytes=options.max_body_bytes, limit_s=options.body_limit_s)
        app = web.Application(middlewares=[errors_as_json], client_max_size=DEFAULT_MAX_BODY_MIB * 2**20)
        app.add_routes(self._routes())
        self._runner = make_runner(app, options)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def here(cls, host: str, port: int, public_url: str = "") -> EndpointServer:
        """The server of the running event loop. The first call starts it."""
        loop = asyncio.get_running_loop()
        starting = _servers.get(loop)
        if starting is None or (starting.done() and starting.exception() is not None):
            starting = _servers[loop] = loop.create_task(cls(host, port, public_url)._start())
        return await asyncio.shield(starting)

    async def _start(self) -> EndpointServer:
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket, backlog=BACKLOG).start()
        self._task = asyncio.get_running_loop().create_task(self._run())
        log.info("agents reach the model at %s", self._url)
        return self

    async def _run(self) -> None:
        """Ends when the event loop cancels its tasks at the end of the run."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            _servers.pop(asyncio.get_running_loop(), None)
            self._bodies.close()
            await self._runner.cleanup()

    def base_url(self, session: Session) -> str:
        return f"{self._url}/episodes/{session.id}/v1"

    def take_refusals(self) -> dict[str, int]:
        """Refused calls since the last call of this method, by code."""
        new = {code: count - self._taken[code] for code, count in self.refusals.items() if count > self._taken[code]}
        self._taken = Counter(self.refusals)
        return new

    @asynccontextmanager
    async def session(self, episode: Episode, rules: SessionRules) -> AsyncIterator[Session]:
        """An address for ``episode`` within this block. Afterwards calls are answered with an error."""
        session = Session(episode, rules)
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            del self._sessions[session.id]
            self._ended[session.id] = None
            while len(self._ended) > _NUM_ENDED:
                self._ended.popitem(last=False)
            await session.close()

    # Handlers

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/episodes/{id}/v1/models", self._models),
            web.get("/episodes/{id}/v1/models/{model:.+}", self._model),
        ]
        for version in ("", "/v1"):
            routes.append(web.post(f"/episodes/{{id}}{version}/reward", self._reward))
            routes.append(web.post(f"/episodes/{{id}}{version}/finish", self._finish))
        routes += [web.post(f"/episodes/{{id}}/v1/{name}", self._call) for name in (CHAT, RESPONSES, *_OTHER_APIS)]
        return routes

    def _find(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["id"])
        if session is None:
            is_late = request.match_info["id"] in self._ended
            raise self._refused(episode_ended() if is_late else _unknown_episode(request))
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {session.key}".encode()):
            raise self._refused(
                ApiError(
                    "wrong API key; send the key of this episode (api_key, or OPENAI_API_KEY in its environment)",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            )
        return session

    def _refused(self, error: ApiError) -> ApiError:
        if not self.refusals[error.code or ""]:
            log.warning("an agent's call was refused: %s (reported once)", error)
        self.refusals[error.code or ""] += 1
        return error

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body = await self._bodies.receive(request)
        if len(body) > _SLOW_BYTES:
            return await self._bodies.in_thread(lambda: read_object(body))
        return read_object(body)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        session = self._find(request)
        with session.counting(is_answer=False):
            body = await self._read(request)
        answer = await answer_call(session, request.path.rpartition("/v1/")[2], body)
        if answer.events is not None:
            return await send_events(request, answer.events, event_bytes)
        assert answer.body is not None
        return reply(answer.body)

    async def _models(self, request: web.Request) -> web.Response:
        self._find(request)
        return reply({"object": "list", "data": [_model(MODEL_NAME)]})

    async def _model(self, request: web.Request) -> web.Response:
        self._find(request)
        return reply(_model(request.match_info["model"]))

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._find(request)
        body = await self._read(request)
        session.given = _given(body)
        return reply({"reward": body["reward"]})

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._find(request)
        body = await self._read(request)
        if body:
            session.given = _given(body)
        session.is_finished.set()
        return reply({"finished": True})


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[EndpointServer]] = WeakKeyDictionary()


def _bind(host: str, port: int) -> Any:
    try:
        return bind(host, port)
    except HeadwaterError as error:
        text = str(error).replace("--host", "host").replace("--port", "port")
        raise ConfigError([f"rollout.workflow_args.{text}"]) from error


def _lacks_port(url: str) -> bool:
    return ":" not in url.rpartition("//")[2].rpartition("]")[2]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "headwater"}


def _unknown_episode(request: web.Request) -> ApiError:
    return ApiError(f"{cut(request.path)}: no such episode", status=404, code="unknown_episode")


def _given(body: Mapping[str, Any]) -> Mapping[str, Any]:
    value = body.get("reward")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong("reward", value, 'must be a number; send {"reward": 1.0}')
    return body
