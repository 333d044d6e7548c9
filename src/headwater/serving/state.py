"""What every handler of a server shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from headwater.serving import json_body
from headwater.serving.active import ActiveRequests
from headwater.serving.errors import ApiError
from headwater.serving.options import ServerOptions
from headwater.serving.prompt import ModelLimits

if TYPE_CHECKING:
    from headwater.engine.engine import Engine

T = TypeVar("T")

_SLOW_BYTES = 2**15
"""A body longer than this takes milliseconds to read and tokenise, so it is read in a thread."""


@dataclass(frozen=True)
class ServerState:
    engine: Engine
    options: ServerOptions
    limits: ModelLimits
    active: ActiveRequests

    @classmethod
    def build(cls, engine: Engine, options: ServerOptions) -> ServerState:
        limits = ModelLimits(
            engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_model_tokens=engine.max_model_tokens,
            max_request_tokens=engine.max_request_tokens,
            max_queue=engine.config.max_queue,
        )
        return cls(engine, options, limits, ActiveRequests())

    async def read(self, request: web.Request, read: Callable[[Mapping[str, Any]], T]) -> T:
        """The body of ``request`` as ``read`` makes it of a JSON object."""
        body = await self._body(request)

        def parse() -> T:
            return read(json_body.read_object(body))

        return await asyncio.to_thread(parse) if len(body) > _SLOW_BYTES else parse()

    async def _body(self, request: web.Request) -> bytes:
        limit = self.options.max_body_bytes
        try:
            # A length that is told is refused before anything is read.
            if request.content_length is not None and request.content_length > limit:
                raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(
                f"the body has more than {limit} bytes; send less at a time, or start the server with a larger "
                "--max-body-mib",
                status=413,
                code="body_too_large",
            ) from error


STATE = web.AppKey("state", ServerState)


def reply(value: Mapping[str, Any] | list[Any], status: int = 200) -> web.Response:
    return web.Response(body=json_body.write(value), status=status, content_type="application/json")
