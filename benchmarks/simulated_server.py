"""A server that computes nothing, for benchmarks of what is in front of servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future

from headwater.core.capabilities import ALL_TAGS, Capabilities, EngineStatus
from headwater.core.protocols import EngineLimits, WeightUpdate, whole_response
from headwater.core.requests import Delta, ModelRequest, ModelResponse


class SimulatedServer:
    """An ``InferenceEngine`` whose answers come from ``answer``."""

    capabilities = Capabilities(streaming=False)
    limits = EngineLimits(vocab_size=1000, max_model_tokens=4096, max_request_tokens=4096, max_queue=1 << 20)

    def __init__(self, answer: Callable[[ModelRequest], Awaitable[ModelResponse]]) -> None:
        self._answer = answer

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self._answer(request)

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        return whole_response(self, request)

    def status(self) -> EngineStatus:
        return EngineStatus(version=0)

    def check(self, request: ModelRequest) -> None: ...
    def abort(self, request_id: str | None = None) -> int:
        return 0

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def update_weights(self, update: WeightUpdate, mode: str | None = None) -> Future[None]:
        raise NotImplementedError("it has no weights")

    def get_version(self) -> int:
        return 0

    def set_version(self, version: int) -> None: ...
    def weights_checksum(self) -> str:
        return ""

    def sleep(self, tags: Sequence[str] = ALL_TAGS) -> None: ...
    def wake(self, tags: Sequence[str] = ALL_TAGS) -> None: ...
    def close(self) -> None: ...
