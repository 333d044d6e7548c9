"""CUDA graphs that several threads of a process record: an engine and a learner may share a GPU.

graph = torch.cuda.CUDAGraph()
with capturing(graph, pool=None, stream=stream):
    step()
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch

_turn = Lock()


@dataclass
class _Pool:
    device: torch.device
    num_bytes: int = 0
    graphs: WeakSet[Any] = field(default_factory=WeakSet)
    """As long as there is one, the pool keeps its memory."""


_pools: dict[Any, _Pool] = {}


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, *, pool: Any, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Record what the block launches. Other threads may use the device meanwhile.

    One thread records at a time: each recording begins with waiting for the whole device, which is an error while
    another one is under way, for both.
    """
    before = torch.cuda.current_stream()
    device = before.device if stream is None else stream.device
    pool = torch.cuda.graph_pool_handle() if pool is None else pool  # its name is needed if the recording fails
    with _turn, _no_garbage_collection():
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                num_bytes = torch.cuda.memory_reserved(device)  # not before: torch frees its cache first
                yield
            _count(graph, device, torch.cuda.memory_reserved(device) - num_bytes)
        except BaseException:
            torch.cuda.set_stream(before)
            _end_allocations(device, pool)
            _record_nothing(device, stream)
            raise
        finally:
            torch.cuda.set_stream(before)  # torch leaves the other stream in place if ending the recording fails


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing a recorded graph is an error in a thread that records another one, and ends that recording.

    Python may find the graph of a discarded engine or learner at any allocation, also of the block that is recorded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def num_pool_bytes(pool: Any) -> int:
    """Memory that the graphs of one pool hold (``CUDAGraph.pool()``)."""
    found = _pools.get(pool)
    return found.num_bytes if found is not None and found.graphs else 0


def num_graph_bytes(device: torch.device) -> int:
    """Memory of the device that recorded graphs hold. Other tensors cannot use it, even while no graph runs."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(pool.num_bytes for pool in list(_pools.values()) if pool.graphs and pool.device.index == index)


def _count(graph: Any, device: torch.device, num_bytes: int) -> None:
    """``num_bytes`` were reserved while ``graph`` was recorded. If other threads reserve memory, this is too much."""
    for key in [key for key, pool in _pools.items() if not pool.graphs]:
        del _pools[key]
    pool = _pools.setdefault(graph.pool(), _Pool(device))
    pool.num_bytes += max(0, num_bytes)
    pool.graphs.add(graph)


def _end_allocations(device: torch.device, pool: Any) -> None:
    """If ending a recording fails, torch's allocator takes it to be still under way. Until the process ends, it would
    then return no memory to the device, not even when it has run out of memory."""
    with suppress(RuntimeError):  # usually it has ended
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)  # as a graph does that was recorded and is discarded


def _record_nothing(device: torch.device, stream: torch.cuda.Stream | None) -> None:
    """If ending a recording fails, torch's random numbers on the device are refused until another recording ends."""
    with suppress(RuntimeError), torch.cuda.device(device):
        empty = torch.zeros(1, device=device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            empty.zero_()
