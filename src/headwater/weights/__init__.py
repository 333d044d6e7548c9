"""Moving a policy version from the learner to an engine, streamed in buckets and verified by checksum.

``publish.py`` is the entry point. Each transport has one file with both of its ends:

- ``memory.py``: the engine runs in this process.
- ``shared_memory.py``: the engine runs in another process on this machine; two slots of one bucket each. vLLM's workers
  read the same slots, handed over by ``backends/vllm/weights.py``.
- ``cuda_ipc.py``: as ``shared_memory.py``, with slots in the memory of a GPU.
- ``file.py``: through a safetensors file.
- ``collective.py``: the learner's ranks send to engines in other processes or on other machines, over torch process
  groups (``links.py``); ``pieces.py`` has the two ends, and ``delta.py`` sends differences over slow links.

``rollout.weight_transfer`` names the file. Its sender is a ``Transport``, which reaches the engine's process through a
``Channel`` of control calls. Its receiver makes a ``WeightUpdate`` from what arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from headwater.core.capabilities import UpdateMode
from headwater.core.protocols import WeightUpdate
from headwater.core.registry import Registry
from headwater.core.waits import wait_for_future

TRANSPORTS = Registry("weight transport", "headwater.weights")
"""Classes that are created with the number type in which weights are sent, a ``torch.dtype``."""


@dataclass(frozen=True)
class ControlCall:
    """A control call to an engine's process (``docs/server.md``)."""

    path: str
    body: Mapping[str, Any]


class Channel(Protocol):
    """How a transport reaches the engine's process during one update. Its methods may be called from any thread."""

    @property
    def url(self) -> str:
        """The address of the engine's process."""
        ...

    @property
    def process(self) -> str:
        """A text that is different for every process of the engine."""
        ...

    @property
    def limit_s(self) -> float:
        """How long one call may take. Running responses may have to end first."""
        ...

    def call(self, call: ControlCall) -> Future[dict[str, Any]]:
        """Make a control call. It fails with ``TransferLost`` if the process does not survive it."""
        ...

    def accepted(self, again: ControlCall | None) -> None:
        """The process uses the new weights. ``TransferLost`` if it has ended since.

        ``again`` is the call that gives the same weights to a process that replaces it. Without one, the learner must
        send them again.
        """
        ...

    def incomplete(self) -> None:
        """The update failed after it had changed weights: the process holds parts of two versions."""
        ...


class Transport(Protocol):
    """The sender's end of a transport, for the updates of one engine, one after the other."""

    @property
    def survives_restart(self) -> bool:
        """What was sent outlives the process that received it.

        Every call of an update may then be repeated to a process that replaces it. Otherwise all calls of an update go
        to the same process.
        """
        ...

    def send(self, update: WeightUpdate, channel: Channel, mode: UpdateMode | None) -> None:
        """Return when the engine uses the weights. ``mode`` is None for the engine's own mode."""
        ...

    def close(self) -> None:
        """Release what is held for the next update and for restarts. Closing twice is allowed."""
        ...


def answer(channel: Channel, call: ControlCall, version: int) -> dict[str, Any]:
    """Make a control call and wait for its answer."""
    future = channel.call(call)
    try:
        return wait_for_answer(channel, future, version)
    finally:
        future.cancel()


def wait_for_answer(channel: Channel, future: Future[dict[str, Any]], version: int) -> dict[str, Any]:
    """Wait for the answer to a control call about the weights of ``version``."""

    def describe() -> str:
        return (
            f"the engine's process takes the weights of version {version}; running responses may have to end first, "
            "and rollout.timeout_s extends this limit"
        )

    return wait_for_future(future, describe, kind="weights", hard_limit_s=channel.limit_s)
