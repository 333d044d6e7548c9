"""Weights between processes' GPUs through pinned shared memory."""

from __future__ import annotations

import threading

import pytest
import torch

from headwater.core.protocols import WeightUpdate
from headwater.models.checksum import checksum
from headwater.models.load import load_model
from headwater.weights import shared_memory
from headwater.weights.memory import Receiver, in_buckets
from headwater.weights.shared_memory import NUM_SLOTS, SlotEntry, SlotReceiver, SlotSender

LIMIT_S = 60.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_pass_through_pinned_slots_without_waiting_for_each_tensor(dtype, monkeypatch):
    """The learner's tensors are still being computed when they are sent, and overwritten right after."""
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 2**18)
    given = load_model("tiny:qwen3", dtype="float32", device="cuda", seed=1)
    expected = checksum(given.named_parameters(), dtype)
    sent = [(name, torch.zeros_like(each)) for name, each in given.named_parameters()]
    # In another number type than that of the slots, the receiver converts on the device.
    for model_dtype in {dtype, torch.bfloat16}:
        model = load_model("tiny:qwen3", dtype=str(model_dtype).removeprefix("torch."), device="cuda", seed=0)
        shapes = {name: tuple(each.shape) for name, each in sent}
        slots = SlotSender(shapes, dtype)
        receiver = SlotReceiver(slots.name, slots.slot_bytes, dtype)
        assert slots._pinned is not None
        update = WeightUpdate(1, shapes, receiver.buckets())
        taking = threading.Thread(target=Receiver(model, shapes).take_all, args=(update,))
        torch.cuda.synchronize()
        torch.cuda._sleep(500_000_000)
        with torch.no_grad():
            for (_, tensor), value in zip(sent, given.parameters(), strict=True):
                tensor.copy_(value)
        taking.start()
        copied = [None] * NUM_SLOTS

        def until_free(slot, copied=copied):
            if copied[slot] is not None:
                copied[slot].result(LIMIT_S)

        num_filled = 0
        for slot, entries in slots.fill(in_buckets(sent, max_bytes=2**17), until_free):
            bucket = [SlotEntry(**each) for each in entries]
            assert receiver._view(slot, bucket[0]).is_pinned()
            copied[slot] = receiver.put(slot, bucket)
            num_filled += 1
        receiver.finish()
        taking.join(LIMIT_S)
        assert not taking.is_alive()
        for _, tensor in sent:
            tensor.fill_(torch.nan)
        slots.close()
        assert num_filled > 3
        arrived = checksum(model.named_parameters())
        assert arrived == (expected if model_dtype == dtype else checksum(given.named_parameters(), model_dtype))
