"""Weights between processes on one machine that use GPUs, through GPU memory that both of them map.

As ``shared_memory.py``, with two slots on the learner's GPU: weights are not copied to main memory and back. Both
processes must see the GPUs under the same numbers, and an engine on another GPU needs peer access to the learner's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headwater.core.capabilities import UpdateMode
from headwater.core.errors import WeightsError
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.weights import TRANSPORTS, Channel
from headwater.weights.shared_memory import (
    NUM_SLOTS,
    MappedMemory,
    Memory,
    SharedMemoryTransport,
    SlotSender,
    slot_size,
)

_PREFIX = "cuda-ipc:"
"""Memory whose name begins with this is on a GPU."""


@TRANSPORTS.register
class CudaIpcTransport(SharedMemoryTransport):
    """The sender. Its slots are on the GPU of the first tensor."""

    def send(self, update: WeightUpdate, channel: Channel, mode: UpdateMode | None) -> None:
        buckets = iter(update.buckets)
        first: Bucket = next(buckets, ())
        devices = {tensor.device for _, tensor in first}
        if not devices or any(each.type != "cuda" for each in devices):
            where = ", ".join(sorted(map(str, devices))) or "nowhere"
            raise WeightsError(
                f"rollout.weight_transfer = cuda_ipc: the learner's weights are on {where}, not on a GPU; use "
                "rollout.weight_transfer=shared_memory"
            )
        self._device = min(devices, key=str)
        super().send(replace(update, buckets=itertools.chain([first], buckets)), channel, mode)

    def _make_slots(self, shapes: Mapping[str, tuple[int, ...]]) -> SlotSender:
        return GpuSlotSender(shapes, self._dtype, self._device)


class GpuSlotSender(SlotSender):
    """Two slots on a GPU."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.slot_bytes = slot_size(shapes, dtype)
        self._memory = torch.empty(NUM_SLOTS * self.slot_bytes, dtype=torch.uint8, device=device)
        self._name = _handle_of(self._memory)

    @property
    def name(self) -> str:
        return self._name

    def _write(self, place: int, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * self.dtype.itemsize
        target = self._memory[place : place + num_bytes].view(self.dtype).view(tensor.shape)
        target.copy_(tensor.detach(), non_blocking=True)

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def map_memory(name: str, size: int) -> Memory:
    """Open memory of another process, on a GPU or in main memory."""
    return MappedGpuMemory(name, size) if name.startswith(_PREFIX) else MappedMemory(name, size)


class MappedGpuMemory:
    """The GPU memory of another process. It stays mapped as long as a tensor refers to it."""

    def __init__(self, name: str, size: int) -> None:
        try:
            handle = _read_handle(name)
            torch.cuda.init()  # type: ignore[no-untyped-call]
            storage = torch.UntypedStorage._new_shared_cuda(*handle)
            self._memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:  # the last one from a torch without CUDA
            raise WeightsError(
                f"the learner's GPU memory cannot be opened ({error}); both processes must be on one machine and see "
                "the same GPUs, otherwise use rollout.weight_transfer=shared_memory"
            ) from error
        if len(self._memory) < size:
            raise WeightsError(f"the learner's GPU memory has {len(self._memory)} bytes, announced {size}")

    def view(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        return self._memory[place : place + count * dtype.itemsize].view(dtype)

    def until_read(self) -> None:
        """Wait until copies from it have ended, so that the other process may change it."""
        for device in {self._memory.device.index, torch.cuda.current_device()}:
            torch.cuda.current_stream(device).synchronize()


_FIELDS = (int, bytes, int, int, bytes, int, bytes, bool)
"""Of a handle: device, memory, size, offset, counter of users with its offset, event, and whether to wait for it."""


def _handle_of(memory: Tensor) -> str:
    """What another process needs to open the memory, as text."""
    fields = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    written = [each.hex() if isinstance(each, bytes) else each for each in fields]
    return _PREFIX + json.dumps(written)


def _read_handle(name: str) -> list[object]:
    fields = json.loads(name.removeprefix(_PREFIX))
    if not isinstance(fields, list) or len(fields) != len(_FIELDS):
        raise ValueError("not a handle of memory")
    fields = [bytes.fromhex(each) if kind is bytes else each for each, kind in zip(fields, _FIELDS, strict=True)]
    if any(type(each) is not kind for each, kind in zip(fields, _FIELDS, strict=True)):
        raise ValueError("not a handle of memory")
    return fields
