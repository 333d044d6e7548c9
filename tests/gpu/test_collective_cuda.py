"""What NCCL asks of the two ends of ``collective``, in one process. ``test_nccl_cuda.py`` has groups of several."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headwater.core.errors import WeightsError
from headwater.core.parcels import Parcel, SendOrder
from headwater.weights.links import Link, Meeting, host_store
from headwater.weights.pieces import GroupMember, PieceReceiver, PieceSender

LIMIT_S = 120.0
PARCELS = [Parcel.whole(f"layer.{number}", (64, 300 + number)) for number in range(12)]


class GpuLink:
    """As a link over NCCL: only tensors on a GPU, and an operation is complete when it is on the stream."""

    def __init__(self, passed: queue.SimpleQueue[torch.Tensor], *, sends: bool) -> None:
        self._passed, self._sends = passed, sends

    def broadcast(self, tensor: torch.Tensor) -> GpuLink:
        if not tensor.is_cuda:
            raise ValueError("Tensors must be CUDA and dense")
        if self._sends:
            self._passed.put(tensor.clone())
            torch.cuda.current_stream().synchronize()
        else:
            tensor.copy_(self._passed.get(timeout=LIMIT_S))
        return self

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("encoding", ["plain", "delta"])
def test_every_bit_arrives_from_gpu_to_gpu(encoding, monkeypatch):
    order = SendOrder("g", "127.0.0.1", 1, 1, "bfloat16", "nccl", bucket_bytes=2**16, encoding=encoding)
    passed: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    monkeypatch.setattr(Link, "connect", lambda meeting, rank, size, gpu="": GpuLink(passed, sends=not rank))
    sender = PieceSender(0)
    assert not sender.connect(order).failure
    member = GroupMember.join(order, 1, 1)
    for seed in (1, 2, 2):
        torch.manual_seed(seed)
        weights = {each.name: torch.randn(each.shape, device="cuda") for each in PARCELS}
        taken: dict[str, torch.Tensor] = {}

        def take(into: dict[str, torch.Tensor] = taken) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for bucket in PieceReceiver(member, PARCELS, order).buckets():
                    into |= {name: tensor.clone() for name, tensor in bucket}
                torch.cuda.current_stream().synchronize()

        with ThreadPoolExecutor(2) as threads:
            taking = threads.submit(take)
            report = sender.send(order, PARCELS, iter(weights.values()))
            taking.result(LIMIT_S)
        assert not report.failure
        assert list(taken) == [each.name for each in PARCELS]
        assert all(torch.equal(taken[name], tensor.to(torch.bfloat16)) for name, tensor in weights.items())


def test_two_members_on_one_gpu_are_told_so_and_not_that_one_has_ended():
    port = host_store("127.0.0.1").port

    def connect(rank: int) -> str:
        with pytest.raises(WeightsError) as error:
            Link.connect(Meeting("127.0.0.1", port, "twice", "nccl", LIMIT_S), rank, 2)
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        told = [each.result(2 * LIMIT_S) for each in [threads.submit(connect, rank) for rank in range(2)]]
    assert all("could not join twice" in each and "Duplicate GPU" in each for each in told), told


def test_a_member_that_never_comes_is_waited_for_with_a_limit():
    started = time.monotonic()
    with pytest.raises(WeightsError, match="could not join alone of two"):
        Link.connect(Meeting("127.0.0.1", host_store("127.0.0.1").port, "alone of two", "nccl", 3.0), 0, 2)
    assert time.monotonic() - started < LIMIT_S


def test_a_tensor_in_main_memory_is_refused_by_name():
    link = Link.connect(Meeting("127.0.0.1", host_store("127.0.0.1").port, "alone", "nccl", LIMIT_S), 0, 1)
    with pytest.raises(WeightsError, match=r"cannot be sent .*CUDA"):
        link.broadcast(torch.zeros(4))
    link.broadcast(torch.zeros(4, device="cuda")).wait()
    link.close()
