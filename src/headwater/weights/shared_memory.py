"""Weights for another process on this machine, through two slots of shared memory.

The sender fills one slot while the receiver copies from the other, so shared memory never holds a whole model. A
control connection carries which tensors a slot holds:

    slots = SlotSender(shapes, torch.bfloat16)                      # in the learner's process
    for slot, entries in slots.fill(buckets, until_free): ...       # tell the receiver slot and entries

    slots = SlotReceiver(name, slot_bytes, torch.bfloat16)          # in the engine's process
    engine.update_weights(WeightUpdate(version, shapes, slots.buckets()))
    slots.put(0, entries)                                           # a future: the slot may be filled again
    slots.finish()
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor

from headwater.core.errors import WeightsError
from headwater.core.protocols import Bucket
from headwater.core.waits import wait_until
from headwater.weights.file import reserve, write_tensor

NUM_SLOTS = 2
_SLOT_BYTES = 64 * 2**20
"""Size of a slot unless a tensor is larger: small enough for a container's /dev/shm, large compared with a call."""
_ALIGNMENT = 64
_NEXT_LIMIT_S = 600.0
"""How long the receiver waits for the next slot, while its engine generates nothing."""


@dataclass(frozen=True)
class SlotEntry:
    """One tensor in a slot."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the start of the slot."""


def slot_size(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """The bytes that a slot needs: room for the largest tensor, and for many small ones."""
    sizes = [_padded(math.prod(shape) * dtype.itemsize) for shape in shapes.values()]
    return max(_ALIGNMENT, min(sum(sizes), _SLOT_BYTES), *sizes)


class SlotSender:
    """The learner's end. Python removes the segment when this process ends, however it ends."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.slot_bytes = slot_size(shapes, dtype)
        self._segment: SharedMemory | None = SharedMemory(create=True, size=NUM_SLOTS * self.slot_bytes)
        self._pinned: Tensor | None = None
        try:
            descriptor = _posixshmem.shm_open(f"/{self._segment.name}", os.O_RDWR, mode=0o600)
            try:
                remedy = "give /dev/shm more space (docker run --shm-size), or use rollout.weight_transfer=file"
                reserve(descriptor, NUM_SLOTS * self.slot_bytes, "shared memory", remedy)
            finally:
                os.close(descriptor)
            self._pinned = _pin(self._buffer)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        assert self._segment is not None, "closed"
        return self._segment.name

    @torch.no_grad()
    def fill(
        self, buckets: Iterable[Bucket], until_free: Callable[[int], None]
    ) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Write the buckets to the slots in turn; yields each slot when it is full, with its entries as JSON values.

        ``until_free`` waits until the receiver no longer needs a slot.
        """
        entries: list[dict[str, Any]] = []
        slot, end = 0, 0
        until_free(slot)
        for bucket in buckets:
            for name, tensor in bucket:
                num_bytes = _padded(tensor.numel() * self.dtype.itemsize)
                if end + num_bytes > self.slot_bytes:
                    if num_bytes > self.slot_bytes:
                        raise WeightsError(f"{name} of shape {tuple(tensor.shape)}: is larger than was announced")
                    yield slot, entries
                    slot, entries, end = (slot + 1) % NUM_SLOTS, [], 0
                    until_free(slot)
                write_tensor(self._buffer, slot * self.slot_bytes + end, tensor, self.dtype)
                entries.append(asdict(SlotEntry(name, tuple(tensor.shape), end)))
                end += num_bytes
        if entries:
            yield slot, entries

    def close(self) -> None:
        """Remove the segment. Closing twice is allowed."""
        _unpin(self._pinned)
        self._pinned = None
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
            segment.unlink()

    @property
    def _buffer(self) -> memoryview:
        assert self._segment is not None, "closed"
        assert self._segment.buf is not None, "an open segment has its memory"
        return self._segment.buf


class SlotReceiver:
    """The engine's end of one update. ``buckets`` runs on the engine's thread, everything else on any other."""

    def __init__(self, name: str, slot_bytes: int, dtype: torch.dtype, *, previous: SlotReceiver | None = None) -> None:
        """``previous`` received the update before this one; a segment that is used again stays mapped."""
        self._segment = (name, NUM_SLOTS * slot_bytes)
        self._memory: _Mapped
        if previous is not None and previous._segment == self._segment:
            self._memory = previous._memory
        else:
            self._memory = _Mapped(*self._segment)
        self._slot_bytes = slot_bytes
        self._dtype = dtype
        self._changed = threading.Condition()
        self._filled: deque[tuple[Bucket, Future[None]]] = deque()
        self._is_finished = False
        self._failure: WeightsError | None = None

    def put(self, slot: int, entries: Iterable[SlotEntry]) -> Future[None]:
        """Hand a filled slot to the engine. The future is done when the slot has been copied."""
        bucket = [(each.name, self._view(slot, each)) for each in entries]
        copied: Future[None] = Future()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._filled.append((bucket, copied))
            self._changed.notify_all()
        return copied

    def finish(self) -> None:
        """All slots have been handed over."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The stream ends here: the sender failed, or another update begins."""
        with self._changed:
            self._failure = self._failure or WeightsError(reason)
            self._changed.notify_all()

    def buckets(self) -> Iterator[Bucket]:
        try:
            while (filled := self._next()) is not None:
                bucket, copied = filled
                yield bucket
                copied.set_result(None)
                del bucket, filled
        finally:
            self.fail("the update has ended")
            with self._changed:
                left, self._filled = list(self._filled), deque()
            for _, copied in left:
                copied.set_exception(WeightsError("the update has ended"))

    def _next(self) -> tuple[Bucket, Future[None]] | None:
        def is_ready() -> bool:
            return bool(self._filled) or self._is_finished or self._failure is not None

        with self._changed:
            what = "the engine waits for the next weights of an update"
            wait_until(self._changed, is_ready, lambda: what, kind="weights", hard_limit_s=_NEXT_LIMIT_S)
            if self._failure is not None:
                raise self._failure
            return self._filled.popleft() if self._filled else None

    def _view(self, slot: int, entry: SlotEntry) -> Tensor:
        count = math.prod(entry.shape)
        num_bytes = count * self._dtype.itemsize
        fits = 0 <= slot < NUM_SLOTS and 0 <= entry.offset <= self._slot_bytes - num_bytes
        if not fits or entry.offset % self._dtype.itemsize or min(entry.shape, default=0) < 0:
            raise WeightsError(
                f"{entry.name} of shape {entry.shape} at byte {entry.offset} of slot {slot}: there are {NUM_SLOTS} "
                f"slots of {self._slot_bytes} bytes"
            )
        if not count:
            return torch.empty(entry.shape, dtype=self._dtype)
        place = slot * self._slot_bytes + entry.offset
        return torch.frombuffer(self._memory.buffer, dtype=self._dtype, count=count, offset=place).view(entry.shape)


class _Mapped:
    """The memory of another process's segment. It stays mapped as long as a tensor refers to it."""

    def __init__(self, name: str, size: int) -> None:
        try:
            # ``SharedMemory`` would register the segment for removal when this process ends, although another owns it.
            descriptor = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
            try:
                self.buffer = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError, OverflowError) as error:
            raise WeightsError(
                f"shared memory {name!r} of {size} bytes: cannot be opened ({error}); keep it until the update ends"
            ) from error
        self._pinned = _pin(self.buffer)

    def __del__(self) -> None:
        _unpin(getattr(self, "_pinned", None))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pin(buffer: memoryview | mmap.mmap) -> Tensor | None:
    """Lock memory for fast copies from and to a GPU, if this process uses one. Without it copies are slower."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
    return memory if int(status) == 0 else None


def _unpin(memory: Tensor | None) -> None:
    if memory is not None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
