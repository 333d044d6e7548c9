"""What counts as free memory of a GPU, from the numbers that the driver and torch's allocator report."""

from __future__ import annotations

import types
from contextlib import contextmanager

import pytest
import torch

from headwater.learner import graph_recorder
from headwater.models import capture
from headwater.models.device import free_bytes, free_for_large_tensors

GPU = torch.device("cuda", 0)


class Graph:
    def __init__(self, pool: tuple[int, int]) -> None:
        self._pool = pool

    def replay(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return self._pool


@pytest.fixture
def gpu(monkeypatch):
    """1000 bytes: 300 of torch, of which 180 are used and 50 are remains of blocks, 200 of others, and 500 free."""

    def fraction_of(device) -> float:
        assert device is None or torch._utils._get_device_index(device) == 0, "raises without a number, as torch does"
        return numbers.fraction

    numbers = types.SimpleNamespace(free=500, reserved=300, fraction=1.0, fraction_of=fraction_of)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (numbers.free, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: numbers.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 180)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"inactive_split_bytes.all.current": 50})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: numbers.fraction_of(device))
    monkeypatch.setattr(capture, "_pools", {})
    return numbers


def test_unused_memory_of_torch_is_free(gpu):
    assert free_bytes(GPU) == 500 + 120
    assert free_for_large_tensors(GPU) == 500 + 120 - 50


def test_a_device_without_a_number_is_the_current_one(gpu):
    graph = Graph((0, 1))
    capture._count(graph, GPU, 60)
    assert free_bytes(torch.device("cuda")) == free_bytes(GPU) == 500 + 60


def test_a_limit_of_the_process_counts(gpu):
    gpu.fraction = 0.4
    assert free_bytes(GPU) == 100 + 120
    gpu.fraction = 0.2  # set after more was reserved
    assert free_bytes(GPU) == 120


def test_memory_of_graphs_is_not_free_until_the_last_graph_of_a_pool_is_gone(gpu):
    first, second, other = Graph((0, 1)), Graph((0, 1)), Graph((0, 2))
    capture._count(first, GPU, 60)
    capture._count(second, GPU, -10)  # another thread has returned memory
    capture._count(other, torch.device("cuda", 1), 40)
    assert free_bytes(GPU) == 500 + 60
    assert [capture.num_pool_bytes(pool) for pool in ((0, 1), (0, 2), None)] == [60, 40, 0]
    del first
    assert free_bytes(GPU) == 500 + 60, "the pool still has a graph"
    del second
    assert free_bytes(GPU) == 500 + 120
    assert capture.num_pool_bytes((0, 1)) == 0
    capture._count(Graph((0, 3)), GPU, 0)
    assert (0, 1) not in capture._pools


def test_a_recorder_counts_the_memory_of_its_graphs_as_free_memory_does(gpu, monkeypatch):
    """Before a graph is recorded, torch returns memory that it does not use. That is no memory of the graph."""

    @contextmanager
    def recording(graph, *, pool, stream):
        gpu.reserved = 180 + 60 * len(graphs)
        yield
        capture._count(graph, GPU, 60)

    graphs: list[Graph] = []

    def make() -> Graph:
        graphs.append(Graph((0, 1)))
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(graph_recorder, "capturing", recording)
    recorder = graph_recorder.CudaRecorder(GPU)
    assert recorder.num_bytes == 0
    recorder.record([lambda: None, lambda: None])
    assert recorder.num_bytes == capture.num_graph_bytes(GPU) == 120
    del graphs[0]
    assert recorder.num_bytes == 120, "the pool still has a graph"
    graphs.clear()
    assert recorder.num_bytes == capture.num_graph_bytes(GPU) == 0
    recorder.record([lambda: None])
    assert recorder.num_bytes == 60
    recorder.forget()
    assert recorder.num_bytes == 0


def test_graphs_can_hold_more_than_is_unused(gpu):
    graph = Graph((0, 1))
    capture._count(graph, GPU, 200)  # some of it is in use
    assert free_bytes(GPU) == free_for_large_tensors(GPU) == 500
