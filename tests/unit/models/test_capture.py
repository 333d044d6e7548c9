"""A recording of a CUDA graph that fails, with torch's functions replaced: what torch leaves behind is put right."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from headwater.models.capture import capturing

GPU = torch.device("cuda", 1)
BEFORE, OTHER = (SimpleNamespace(device=GPU, name=name) for name in ("before", "other"))


class Cuda:
    """Keeps what torch keeps: the current stream, and the pools of the recordings that are under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = BEFORE
        self.under_way: list[tuple[int, int]] = []
        self.num_users: dict[tuple[int, int], int] = {}
        self.num_recorded = 0
        self.can_end = True
        for name, value in (
            ("current_stream", lambda: self.stream),
            ("set_stream", self.set_stream),
            ("graph_pool_handle", lambda: (0, 7)),
            ("memory_reserved", lambda _: 0),
            ("device", lambda _: nullcontext()),
            ("graph", self.graph),
            ("CUDAGraph", lambda: Graph((0, 9))),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.empty(1))

    def set_stream(self, stream) -> None:
        self.stream = stream

    def end(self, device: int, pool: tuple[int, int]) -> None:
        assert device == GPU.index
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert device == GPU.index
        self.num_users[pool] -= 1

    @contextmanager
    def graph(self, graph, pool=(0, 9), stream=None, capture_error_mode="global"):
        assert not self.under_way, "torch would use the memory of the wrong pool"
        assert capture_error_mode == "thread_local"
        before, self.stream = self.stream, stream
        self.under_way.append(pool)
        self.num_users[pool] = self.num_users.get(pool, 0) + 1
        try:
            yield
        finally:
            if not self.can_end:  # as torch does, before it has put anything back
                self.can_end = True
                raise RuntimeError("operation failed due to a previous error during capture")
            self.under_way.remove(pool)
            self.stream = before
            self.num_recorded += 1


class Graph:
    def __init__(self, pool: tuple[int, int]) -> None:
        self._pool = pool

    def pool(self) -> tuple[int, int]:
        return self._pool


@pytest.mark.parametrize("pool", [None, (0, 3)])
def test_after_a_recording_that_cannot_be_ended_another_one_can_be_made(pool, monkeypatch):
    cuda = Cuda(monkeypatch)
    cuda.can_end = False
    used = pool or (0, 7)
    cuda.num_users[used] = 0 if pool is None else 1
    with pytest.raises(RuntimeError, match="previous error"), capturing(Graph(used), pool=pool, stream=OTHER):
        raise ValueError("a kernel could not be recorded")
    assert cuda.stream is BEFORE
    assert not cuda.under_way
    assert cuda.num_users[used] == (0 if pool is None else 1), "only the graphs that were recorded hold the pool"
    assert cuda.num_recorded == 1, "a recording that ends lets torch draw random numbers again"


def test_a_pool_whose_recording_has_ended_is_left_to_its_graph(monkeypatch):
    cuda = Cuda(monkeypatch)
    with pytest.raises(ValueError, match="in Python"), capturing(Graph((0, 7)), pool=None, stream=OTHER):
        raise ValueError("an error in Python")
    assert cuda.stream is BEFORE
    assert not cuda.under_way
    assert cuda.num_users[(0, 7)] == 1, "the graph releases it"


def test_a_recording_leaves_the_stream_and_counts_its_pool(monkeypatch):
    cuda = Cuda(monkeypatch)
    with capturing(Graph((0, 7)), pool=None, stream=OTHER):
        assert cuda.stream is OTHER
    assert cuda.stream is BEFORE
    assert (cuda.num_recorded, cuda.num_users) == (1, {(0, 7): 1})


def test_python_collects_no_garbage_during_a_recording(monkeypatch):
    """The garbage may hold a graph, and freeing one would end the recording (tests/gpu)."""
    Cuda(monkeypatch)
    with capturing(Graph((0, 7)), pool=None, stream=OTHER):
        assert not gc.isenabled()
    assert gc.isenabled()
