"""Weights through two slots of shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import tiny
import torch
from log import own_records

from headwater.core.errors import WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.models.checksum import checksum
from headwater.weights import segments, shared_memory
from headwater.weights.cuda_ipc import CudaIpcTransport, map_memory
from headwater.weights.memory import Receiver, in_buckets
from headwater.weights.shared_memory import NUM_SLOTS, SlotEntry, SlotReceiver, SlotSender

LIMIT_S = 60.0


def parameters(seed=1):
    return [(name, parameter.detach()) for name, parameter in tiny.model(seed).named_parameters()]


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors}


@pytest.fixture
def small_slots(monkeypatch):
    """So small that a tiny model needs many of them."""
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 2**16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_passes_through_slots_that_are_far_smaller(small_slots, dtype):
    sent, model = parameters(), tiny.model(0).to(dtype)
    slots = SlotSender(shapes_of(sent), dtype)
    receiver = SlotReceiver(slots.name, slots.slot_bytes, dtype)
    update = WeightUpdate(1, shapes_of(sent), receiver.buckets())
    taking = threading.Thread(target=Receiver(model, update.shapes).take_all, args=(update,))
    taking.start()
    copied, num_filled = [None] * NUM_SLOTS, 0

    def until_free(slot):
        if copied[slot] is not None:
            copied[slot].result(LIMIT_S)

    for slot, entries in slots.fill(in_buckets(sent, max_bytes=2**15), until_free):
        assert slot == num_filled % NUM_SLOTS
        copied[slot] = receiver.put(slot, [SlotEntry(**each) for each in entries])
        num_filled += 1
    receiver.finish()
    taking.join(LIMIT_S)
    assert num_filled > 3
    assert NUM_SLOTS * slots.slot_bytes < sum(tensor.numel() * dtype.itemsize for _, tensor in sent)
    assert checksum(model.named_parameters()) == checksum(sent, dtype)
    name = slots.name
    slots.close()
    slots.close()
    assert not Path("/dev/shm", name).exists()


def test_a_slot_may_be_filled_again_only_when_it_was_copied():
    slots = SlotSender({"w": (4,)}, torch.float32)
    receiver = SlotReceiver(slots.name, slots.slot_bytes, torch.float32)
    [(slot, entries)] = slots.fill([[("w", torch.ones(4))]], lambda slot: None)
    copied = receiver.put(slot, [SlotEntry(**each) for each in entries])
    stream = receiver.buckets()
    [(_, tensor)] = next(stream)
    assert tensor.tolist() == [1.0] * 4
    assert not copied.done()
    receiver.finish()
    assert next(stream, None) is None
    assert copied.done()
    slots.close()


def test_a_stream_ends_with_its_cause():
    slots = SlotSender({"w": (4,)}, torch.float32)

    def started():
        return SlotReceiver(slots.name, slots.slot_bytes, torch.float32)

    failed = started()
    failed.fail("the learner has failed")
    with pytest.raises(WeightsError, match="the learner has failed"):
        next(failed.buckets())
    closed, entry = started(), SlotEntry("w", (4,), 0)
    stream = closed.buckets()
    closed.put(0, [entry])
    waiting = closed.put(1, [entry])
    next(stream)
    stream.close()
    with pytest.raises(WeightsError, match="the update has ended"):
        waiting.result(LIMIT_S)
    with pytest.raises(WeightsError, match="the update has ended"):
        closed.put(0, [entry])
    slots.close()


def test_entries_outside_their_slot_are_refused():
    slots = SlotSender({"w": (16,)}, torch.float32)
    receiver = SlotReceiver(slots.name, slots.slot_bytes, torch.float32)
    size = slots.slot_bytes
    for slot, shape, offset in [
        (2, (1,), 0),
        (-1, (1,), 0),
        (0, (17,), 0),
        (0, (1,), size),
        (0, (1,), 2),
        (0, (-1,), 0),
    ]:
        with pytest.raises(WeightsError, match=f"there are 2 slots of {size} bytes"):
            receiver.put(slot, [SlotEntry("w", shape, offset)])
    with pytest.raises(WeightsError, match="larger than was announced"):
        list(slots.fill([[("w", torch.zeros(17))]], lambda slot: None))
    slots.close()


def test_a_segment_that_is_not_there_is_refused():
    for name in ("nowhere", "a/b", "../x", "", "a\x00b", "\ud800", "x" * 5000):
        with pytest.raises(WeightsError, match="cannot be opened"):
            SlotReceiver(name, 64, torch.float32)


def test_no_space_is_told_with_a_remedy_and_leaves_nothing_behind(monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def remembering(*args: object, **kwargs: object) -> SharedMemory:
        made.append(SharedMemory(*args, **kwargs))
        return made[-1]

    made: list[SharedMemory] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(segments, "SharedMemory", remembering)
    with pytest.raises(WeightsError, match=r"No space left on device.*weight_transfer=file"):
        SlotSender({"w": (3,)}, torch.float32)
    assert len(made) == 1
    assert not Path("/dev/shm", made[0].name).exists()


SENDER_AND_RECEIVER = """
import torch
from headwater.weights.shared_memory import SlotEntry, SlotReceiver, SlotSender

slots = SlotSender({"a": (3,)}, torch.float32)
receiver = SlotReceiver(slots.name, slots.slot_bytes, torch.float32)
[(slot, entries)] = slots.fill([[("a", torch.ones(3))]], lambda slot: None)
receiver.put(slot, [SlotEntry(**each) for each in entries])
print(next(receiver.buckets())[0][1].tolist())
slots.close()
"""


def test_a_segment_may_be_read_in_the_process_that_made_it():
    """Python keeps a list of segments to clean up, and complains about one that was removed twice."""
    command = [sys.executable, "-c", SENDER_AND_RECEIVER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[1.0, 1.0, 1.0]", "")


class FakeCudart:
    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.status == 0:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("status", [0, 2])
def test_both_ends_pin_their_memory_while_they_use_it_and_do_without(monkeypatch, caplog, status):
    fake = FakeCudart(status)
    monkeypatch.setattr(shared_memory, "_device_in_use", lambda: 0)
    monkeypatch.setattr(shared_memory, "_clear_cuda_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    slots = SlotSender({"w": (4,)}, torch.float32)
    receiver = SlotReceiver(slots.name, slots.slot_bytes, torch.float32)
    size = NUM_SLOTS * slots.slot_bytes
    assert list(fake.registered.values()) == ([size, size] if status == 0 else [])
    assert all(address % os.sysconf("SC_PAGE_SIZE") == 0 for address in fake.registered)
    assert [each.getMessage().partition("so copies are slower: ")[2] for each in own_records(caplog)] == (
        [] if status == 0 else ["CUDA error 2"] * 2
    )
    [(slot, entries)] = slots.fill([[("w", torch.ones(4))]], lambda slot: None)
    receiver.put(slot, [SlotEntry(**each) for each in entries])
    assert next(receiver.buckets())[0][1].tolist() == [1.0] * 4
    slots.close()
    del receiver
    assert fake.registered == {}


def test_gpu_memory_that_cannot_be_shared_is_refused_with_a_remedy():
    transport = CudaIpcTransport(torch.float32)
    with pytest.raises(WeightsError, match=r"the learner's weights are on cpu, not on a GPU.*shared_memory"):
        transport.send(WeightUpdate.of(1, [("w", torch.ones(2))]), None, None)
    for handle in ("", "[]", '[0, "zz", 1, 0, "", 0, "", false]', "[0, 1, 1, 0, 1, 0, 1, 0]"):
        with pytest.raises(WeightsError, match=r"GPU memory cannot be opened.*on one machine"):
            SlotReceiver(f"cuda-ipc:{handle}", 8, torch.float32, map_memory=map_memory)
