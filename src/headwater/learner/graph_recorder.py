"""Records what a pass launches on the device, to launch it again with one call.

forward, backward = recorder.record([run_forward, run_backward])
forward()                   # the same kernels on the same addresses
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from headwater.models.capture import capturing, num_pool_bytes

Action = Callable[[], None]
"""Reads and writes tensors whose addresses do not change."""


class PassRecorder(Protocol):
    @property
    def num_bytes(self) -> int:
        """Memory of the device that is held by what was recorded."""
        ...

    def record(self, actions: Sequence[Action]) -> list[Action]:
        """Functions that repeat ``actions``, which are called in this order, one right after the other."""
        ...

    def forget(self) -> None:
        """Nothing of what was recorded is used any more."""
        ...


class CudaRecorder:
    """Records CUDA graphs. All of them share one pool of memory, because only one set of actions runs at a time.

    What an action has allocated and still holds after the recording is valid from its own replay until the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._num_recorded = 0

    @property
    def num_bytes(self) -> int:
        return num_pool_bytes(self._pool)

    def record(self, actions: Sequence[Action]) -> list[Action]:
        # Kernels are chosen, compiled and loaded here, which is not possible while a graph is recorded. In the first
        # pass torch.compile may find that a size varies, and compiles again in the second.
        for _ in range(1 if self._num_recorded else 2):
            for action in actions:
                action()
        graphs = [torch.cuda.CUDAGraph() for _ in actions]
        for graph, action in zip(graphs, actions, strict=True):
            with capturing(graph, pool=self._pool, stream=self._stream):
                action()
            self._pool = graph.pool()
        self._num_recorded += 1
        return [graph.replay for graph in graphs]

    def forget(self) -> None:
        self._pool = None  # a pool without graphs cannot be used again
