"""The state that all handlers of a server share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from headwater.chat.parsers import ToolCallParser, make_parser
from headwater.core.capabilities import MemoryTag, UpdateMode
from headwater.core.errors import HeadwaterError
from headwater.core.media import MediaProcessor
from headwater.core.protocols import InferenceEngine, Tokenizer
from headwater.core.requests import ModelRequest
from headwater.data.media import MediaCache, media_cache
from headwater.serving.control import WeightUpdates, in_own_thread, read_memory_tags
from headwater.serving.errors import unsupported_by_engine, wrong
from headwater.serving.fields import write_json
from headwater.serving.native.media import STORE_BYTES
from headwater.serving.options import ServerOptions
from headwater.serving.prompt import ModelLimits
from headwater.serving.reading import BodyReader, parse

T = TypeVar("T")

_SLOW_TOKENS = 2**10
"""A reply with more tokens than this takes milliseconds to write, so it is written in a thread."""


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
    bodies: BodyReader
    updates: WeightUpdates
    parser: ToolCallParser | None
    """Finds tool calls in replies; None if the format of this model's calls is unknown."""
    media: MediaCache | None
    """Images and videos that clients have sent; None if the engine takes only text."""
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    """Different in every process, so that clients notice that a server was restarted."""

    @classmethod
    def build(
        cls,
        engine: InferenceEngine,
        tokenizer: Tokenizer,
        options: ServerOptions,
        processor: MediaProcessor | None = None,
    ) -> ServerState:
        # Its first use may change a tokenizer that pads or truncates, which fails while another thread uses it.
        tokenizer.encode("a")
        takes_media = engine.capabilities.media
        if takes_media and processor is not None:
            processor.encode("a", ())  # its tokenizer is another one
        limits = ModelLimits(
            tokenizer,
            engine.limits,
            options.max_responses,
            processor if takes_media else None,
            options.fetches_media,
        )
        bodies = BodyReader(max_bytes=options.max_body_bytes, limit_s=options.body_limit_s)
        parser = find_parser(options.tool_parser, tokenizer)
        media = media_cache(STORE_BYTES) if takes_media else None
        return cls(engine, tokenizer, options, limits, ActiveRequests(), bodies, WeightUpdates(engine), parser, media)

    async def read(self, request: web.Request, read: Callable[[Mapping[str, Any]], T]) -> T:
        """Parse the body of ``request`` as a JSON object and pass it to ``read``, in a thread.

        Even a short body may ask for thousands of responses.
        """
        body = await self.bodies.receive(request)
        return await self.bodies.in_thread(lambda: parse(body, read))

    async def read_control(self, request: web.Request, read: Callable[[Mapping[str, Any]], T]) -> T:
        """As ``read``, but a short body is parsed at once: a control call must not wait for prompts of others."""
        return await self.bodies.read_control(request, read)

    async def write(self, build: Callable[[], Mapping[str, Any] | list[Any]], num_tokens: int) -> web.Response:
        """Reply with what ``build`` returns. It formats ``num_tokens`` tokens, in a thread if they are many."""

        def body() -> bytes:
            return write_json(build())

        written = await self.bodies.in_thread(body) if num_tokens > _SLOW_TOKENS else body()
        return web.Response(body=written, content_type="application/json")

    async def sleep(self, request: web.Request) -> tuple[MemoryTag, ...]:
        """Release the memory that the body of ``request`` names. Return its tags."""
        tags = await self._memory_tags(request)
        await in_own_thread(lambda: self.engine.sleep(tags))
        return tags

    async def wake(self, request: web.Request) -> tuple[MemoryTag, ...]:
        """Allocate the memory that the body of ``request`` names. Return its tags."""
        tags = await self._memory_tags(request)
        await in_own_thread(lambda: self.engine.wake(tags))
        return tags

    async def abort(self, name: str | None) -> int:
        """Abort the requests with this name, or all if it is None. Return how many were ended."""
        if name is None:
            return await in_own_thread(self.engine.abort)
        ids = self.active.find(name)
        return await in_own_thread(lambda: sum(self.engine.abort(each) for each in ids))

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

    async def _memory_tags(self, request: web.Request) -> tuple[MemoryTag, ...]:
        tags = await self.read_control(request, read_memory_tags)
        known = self.engine.capabilities.memory_tags
        missing = [tag for tag in tags if tag not in known]
        if missing:
            remedy = f"use {', '.join(known)}" if known else "it has no memory that can be released"
            raise unsupported_by_engine(
                f"tags: this engine cannot release {', '.join(missing)}; {remedy}", param="tags"
            )
        return tags

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


def find_parser(name: str, tokenizer: Tokenizer) -> ToolCallParser | None:
    """The parser that ``--tool-parser`` names. With ``auto``, None if the chat template does not show the format."""
    try:
        return make_parser(name, tokenizer, "--tool-parser")
    except HeadwaterError:
        if name != "auto":
            raise
        return None


STATE = web.AppKey("state", ServerState)
