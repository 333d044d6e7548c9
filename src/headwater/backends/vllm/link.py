"""The calls to one vLLM, whether it is a server or in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from headwater.backends.vllm.dialect import Dialect
from headwater.backends.vllm.wire import Chunk
from headwater.core.protocols import MemoryTag

INSIDE = Path(__file__).parent / "inside"
"""What runs in the environment of vLLM."""
OWN_WORKER = "headwater_vllm_worker.Worker"
"""The class in this folder whose methods vLLM's workers get."""
PauseMode = Literal["abort", "wait", "keep"]
"""What vLLM does with running requests: end them with the tokens they have, finish them, or keep them for later."""


class LinkLost(ConnectionError):
    """vLLM cannot be reached: it has ended, is about to, or the network failed."""


@dataclass(frozen=True)
class VllmInfo:
    """What a vLLM tells about itself."""

    version: str
    dialect: Dialect
    model: str
    """The folder or name that it was started with."""
    dtype: str
    """Without ``torch.``."""
    instance: str
    """Another one after every start."""
    max_model_tokens: int
    max_sequences: int
    logprobs_mode: str
    device: str
    """``cpu`` or ``cuda``."""
    has_own_worker: bool
    """Its workers have the methods of ``inside/headwater_vllm_worker.py``."""
    can_sleep: bool
    """It was started with ``--enable-sleep-mode`` on a device that has it."""
    text_config: Mapping[str, Any] = field(default_factory=dict)
    """The numbers of the model's config.json; empty if they are not told."""


class Link(Protocol):
    """One connection to one vLLM. Belongs to one event loop. Every call raises ``LinkLost`` if vLLM is gone."""

    async def describe(self) -> VllmInfo: ...
    def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The answer to a request of ``wire.write_request``. Closing the generator ends the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request by the id of its body. Its stream ends with stop reason ``abort``."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Return when nothing is generated any more. Requests that arrive later wait for ``resume``."""
        ...

    async def resume(self) -> None: ...
    async def reload(self, folder: str) -> None:
        """Load the safetensors files of a folder into the model."""
        ...

    async def set_label(self, label: str) -> None:
        """Label the present weights. Only for a dialect that labels tokens."""
        ...

    async def sleep(self, tags: Sequence[MemoryTag]) -> None: ...
    async def wake(self, tags: Sequence[MemoryTag]) -> None: ...
    async def check_alive(self) -> None: ...
    @property
    def measured(self) -> Mapping[str, float]:
        """What it said about itself at the last health check, in the names of ``EngineStatus.metrics``."""
        ...

    async def close(self) -> None: ...
