"""The state that all handlers of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from headwater.core.protocols import InferenceEngine, MemoryTag, Tokenizer, UpdateMode
from headwater.core.records import ModelRequest
from headwater.serving.errors import ApiError, unsupported_by_engine, wrong
from headwater.serving.fields import read_object
from headwater.serving.options import ServerOptions
from headwater.serving.prompt import ModelLimits

T = TypeVar("T")

_SLOW_BYTES = 2**15
"""A body longer than this takes milliseconds to parse and tokenise, so it is parsed in a thread."""


class ActiveRequests:
    """The running requests, by the names that clients use to abort them.

    A name refers to one engine request or to several, such as a batch or the samples of one prompt.
    """

    def __init__(self) -> None:
        self._ids: dict[str, list[tuple[str, ...]]] = {}

    @contextmanager
    def hold(self, names: Mapping[str, tuple[str, ...]], field: str) -> Iterator[None]:
        """Reserve ``names`` within the block. ``field`` is the name of the request field they came from."""
        for name in names:
            if name in self._ids:
                raise wrong(field, name, "a request with this name is running; use another name, or abort that one")
        with self.share(names):
            yield

    @contextmanager
    def share(self, names: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
        """As ``hold``, but other requests may use the same name. Aborting the name ends all of them."""
        for name, ids in names.items():
            self._ids.setdefault(name, []).append(ids)
        try:
            yield
        finally:
            for name, ids in names.items():
                self._ids[name].remove(ids)
                if not self._ids[name]:
                    del self._ids[name]

    def find(self, name: str) -> tuple[str, ...]:
        """The engine's request ids for ``name``. Empty if no request with this name is running."""
        return tuple(dict.fromkeys(each for ids in self._ids.get(name, ()) for each in ids))


@dataclass(frozen=True)
class ServerState:
    engine: InferenceEngine
    tokenizer: Tokenizer
    options: ServerOptions
    limits: ModelLimits
    active: ActiveRequests

    @classmethod
    def build(cls, engine: InferenceEngine, tokenizer: Tokenizer, options: ServerOptions) -> ServerState:
        return cls(engine, tokenizer, options, ModelLimits(tokenizer, engine.limits), ActiveRequests())

    async def read(self, request: web.Request, read: Callable[[Mapping[str, Any]], T]) -> T:
        """Parse the body of ``request`` as a JSON object and pass it to ``read``."""
        body = await self._body(request)

        def parse() -> T:
            return read(read_object(body))

        return await asyncio.to_thread(parse) if len(body) > _SLOW_BYTES else parse()

    async def _body(self, request: web.Request) -> bytes:
        limit = self.options.max_body_bytes
        try:
            # If the client declares the length, refuse the body before reading it.
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

    async def abort(self, name: str | None) -> int:
        """Abort the requests with this name, or all if it is None. Return how many were ended."""
        if name is None:
            return await asyncio.to_thread(self.engine.abort)
        ids = self.active.find(name)
        return await asyncio.to_thread(lambda: sum(self.engine.abort(each) for each in ids))

    # Refusals of calls that the engine cannot do

    def check_given_tokens(self, request: ModelRequest) -> None:
        if request.given_tokens and not self.engine.capabilities.resumable:
            raise unsupported_by_engine(
                "given_tokens: this engine cannot continue a response; send the prompt alone", param="given_tokens"
            )

    def check_features(self, request: ModelRequest) -> None:
        missing = [each for each in request.sampling.features if each not in self.engine.capabilities.features]
        if missing:
            raise unsupported_by_engine(
                f"this engine does not support {', '.join(missing)}; remove these settings, or serve the model with "
                "--backend embedded",
                param=missing[0],
            )

    def check_memory_tags(self, tags: tuple[MemoryTag, ...]) -> None:
        known = self.engine.capabilities.memory_tags
        missing = [tag for tag in tags if tag not in known]
        if missing:
            remedy = f"use {', '.join(known)}" if known else "it has no memory that can be released"
            raise unsupported_by_engine(
                f"tags: this engine cannot release {', '.join(missing)}; {remedy}", param="tags"
            )

    def check_update_mode(self, mode: UpdateMode | None, field: str) -> None:
        known = self.engine.capabilities.update_modes
        if mode is not None and mode not in known:
            raise unsupported_by_engine(
                f"{field}: this engine does not support the update mode {mode}; it supports {', '.join(known)}",
                param=field,
            )

    def check_checksums(self) -> None:
        if not self.engine.capabilities.checksums:
            raise unsupported_by_engine("this engine cannot compute a checksum of its weights")


STATE = web.AppKey("state", ServerState)
