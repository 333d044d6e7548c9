"""CUDA graphs that several threads of a process record: an engine and a learner may share a GPU.

graph = torch.cuda.CUDAGraph()
with capturing(graph, pool=None, stream=stream):
    step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_turn = Lock()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, pool: Any, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Record what the block launches. Other threads may use the device meanwhile.

    One thread records at a time: each recording begins with waiting for the whole device, which is an error while
    another one is under way, for both.
    """
    before = torch.cuda.current_stream()
    with _turn:
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            torch.cuda.set_stream(before)  # torch leaves the other stream in place if ending the recording fails
