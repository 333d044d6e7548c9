"""Responses in parts, from engines with and without streaming, and for whoever listens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar

from headwater.core.engine import EpisodeEngine
from headwater.core.errors import RolloutFailed
from headwater.core.request import ModelRequest
from headwater.core.response import Delta, ModelResponse

delta_listener: ContextVar[Callable[[Delta], None] | None] = ContextVar("headwater_delta_listener", default=None)
"""Receives the tokens of an episode's next reply as they are generated, if the engine can stream."""


async def whole_response(engine: EpisodeEngine, request: ModelRequest) -> AsyncGenerator[Delta, None]:
    """``astream`` for an engine without streaming: the complete response as one delta."""
    yield Delta.of(await engine.agenerate(request))


async def generate_aloud(engine: EpisodeEngine, request: ModelRequest) -> ModelResponse:
    """``agenerate``, and pass new tokens to the ``delta_listener`` of the running task, if there is one."""
    listener, stream = delta_listener.get(), getattr(engine, "astream", None)
    if listener is None or stream is None:
        return await engine.agenerate(request)
    parts: list[Delta] = []
    began = first = time.monotonic()
    async with aclosing(stream(request)) as deltas:
        async for delta in deltas:
            first = first if parts else time.monotonic()
            parts.append(delta)
            listener(delta)
    if not parts or parts[-1].stop_reason is None:
        raise RolloutFailed(f"request {request.request_id}: the engine's stream has no end")
    return ModelResponse(
        request.input_tokens,
        tuple(token for part in parts for token in part.tokens),
        tuple(logprob for part in parts for logprob in part.logprobs),
        tuple(version for part in parts for version in part.versions),
        parts[-1].stop_reason,
        queue_s=first - began,
        generate_s=time.monotonic() - first,
    )
