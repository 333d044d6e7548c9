"""The control calls of one weight update to a ``headwater serve``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from headwater.backends.native.client import ServerClient
from headwater.backends.native.server import NativeServer
from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future
from headwater.weights import ControlCall


@dataclass
class EngineChannel:
    """A ``weights.Channel``. Its methods may be called from any thread."""

    server: NativeServer
    start: Callable[[Coroutine[Any, Any, Any]], Future[Any]]
    """Starts a coroutine on the server's event loop."""
    version: int
    client: ServerClient | None
    """The process that takes the update. None until the first answer if every process may take it."""
    limit_s: float
    is_pinned: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_pinned = self.client is not None

    @property
    def url(self) -> str:
        assert self.client is not None, "known before the first call, or after it"
        return self.client.url

    @property
    def process(self) -> str:
        return f"{self.url} {id(self.client)}"

    def call(self, call: ControlCall) -> Future[dict[str, Any]]:
        return self.start(self._call(call))

    def accepted(self, again: ControlCall | None) -> None:
        self._do(lambda client: self.server.weights_arrived(client, self.version, again))

    def incomplete(self) -> None:
        self._do(self.server.weights_incomplete)

    async def _call(self, call: ControlCall) -> dict[str, Any]:
        if self.is_pinned:
            assert self.client is not None, "given"
            return await self.server.call_same(self.client, call.path, call.body)
        self.client, answer = await self.server.call_any(call.path, call.body)
        return answer

    def _do(self, change: Callable[[ServerClient], None]) -> None:
        async def on_the_servers_loop() -> None:
            assert self.client is not None, "it has answered"
            change(self.client)

        done = self.start(on_the_servers_loop())
        try:
            what = "the engine's process has taken weights"
            wait_for_future(done, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)
        finally:
            done.cancel()
