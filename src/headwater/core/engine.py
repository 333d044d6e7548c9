"""The inference engine: generates responses and takes new weights. Any class with these methods can be used."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from headwater.core.capabilities import ALL_TAGS, Capabilities, MemoryTag, UpdateMode
from headwater.core.engine_status import EngineStatus
from headwater.core.request import ModelRequest
from headwater.core.response import Delta, ModelResponse
from headwater.core.weights import WeightUpdate


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The sizes that an engine checks requests against."""

    vocab_size: int
    """Token ids are in ``0..vocab_size - 1``."""
    max_model_tokens: int
    """The longest prompt and response together that the model supports."""
    max_request_tokens: int
    """As ``max_model_tokens``, but smaller if the KV cache holds less than that."""
    max_queue: int
    """The largest number of requests that may wait or run at the same time."""


class EpisodeEngine(Protocol):
    """What an episode sees of the engine."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse: ...


class InferenceEngine(EpisodeEngine, Protocol):
    """Generates responses, tags every token with the policy version that produced it, and takes new weights.

    ``pause`` stops generation and keeps every request; ``sleep`` also releases memory until ``wake``.
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def limits(self) -> EngineLimits: ...
    def status(self) -> EngineStatus: ...
    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        ...

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield new tokens as they are generated. Closing the generator early ends the request.

        An engine that cannot stream returns ``streaming.whole_response(self, request)``.
        """
        ...

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all requests if it is None. Return how many were ended.

        An aborted request returns the tokens it has, with stop reason ``abort``.
        """
        ...

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Take new weights. Names and shapes are checked first; a mismatch leaves the old weights in place.

        A stream that fails after a weight was changed is ``WeightsIncomplete``: the engine keeps its requests and
        generates nothing until a later update succeeds.
        """
        ...

    def get_version(self) -> int: ...
    def set_version(self, version: int) -> None: ...
    def weights_checksum(self) -> str:
        """The checksum of the weights in use, as computed by ``models.checksum``."""
        ...

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None: ...
    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None: ...
    def close(self) -> None: ...
