"""Weights for another process on this machine, through two slots of shared memory.

The sender fills one slot while the receiver copies from the other, so shared memory never holds a whole model. Control
calls carry which tensors a slot holds:

    transport = SharedMemoryTransport(torch.bfloat16)               # in the learner's process
    transport.send(update, channel, mode)

    slots = SlotReceiver(name, slot_bytes, torch.bfloat16)          # in the engine's process
    engine.update_weights(slots.update(version, shapes))
    slots.put(0, entries)                                           # a future: the slot may be filled again
    slots.finish()
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import logging
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.core.capabilities import UpdateMode
from headwater.core.errors import HeadwaterError, WeightsError, WeightsIncomplete
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.core.waits import wait_until
from headwater.models.device import DTYPES
from headwater.weights import TRANSPORTS, Channel, ControlCall, answer, wait_for_answer
from headwater.weights.file import write_tensor
from headwater.weights.segments import Segment

logger = logging.getLogger(__name__)

NUM_SLOTS = 2
_SLOT_BYTES = 64 * 2**20
"""Size of a slot unless a tensor is larger: small enough for a container's /dev/shm, large compared with a call."""
_ALIGNMENT = 64
_NEXT_LIMIT_S = 60.0
"""How long the receiver waits for the next slot. Its engine generates nothing meanwhile, so that a sender that has
disappeared must not block it for long."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


@TRANSPORTS.register
class SharedMemoryTransport:
    """The sender. The slots of the first update are used again by the others, unless a tensor is larger."""

    survives_restart = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._slots: SlotSender | None = None

    def send(self, update: WeightUpdate, channel: Channel, mode: UpdateMode | None) -> None:
        slots, version = self._slots_for(update.shapes), update.version
        start = {
            "version": version,
            "mode": mode,
            "shapes": {name: list(shape) for name, shape in update.shapes.items()},
            "dtype": _DTYPE_NAMES[self._dtype],
            "shared_memory": slots.name,
            "slot_bytes": slots.slot_bytes,
            "limit_s": channel.limit_s,
            "adapters_alone": update.adapters_alone,
        }
        # Refused here if names or shapes do not fit.
        answer(channel, ControlCall("/control/start_weight_update", start), version)
        sending: list[Future[dict[str, Any]] | None] = [None] * NUM_SLOTS

        def until_free(slot: int) -> None:
            if (sent := sending[slot]) is not None:
                wait_for_answer(channel, sent, version)

        try:
            for slot, entries in slots.fill(update.buckets, until_free):
                filled = ControlCall("/control/update_weight_slot", {"slot": slot, "tensors": entries})
                sending[slot] = channel.call(filled)
            for slot in range(NUM_SLOTS):
                until_free(slot)
            answer(channel, ControlCall("/control/finish_weight_update", {}), version)
        except BaseException as error:
            self._abandon(channel, version, error)
            raise
        channel.accepted(None)

    def close(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()

    def _slots_for(self, shapes: Mapping[str, tuple[int, ...]]) -> SlotSender:
        if self._slots is None or slot_size(shapes, self._dtype) > self._slots.slot_bytes:
            self.close()
            self._slots = self._make_slots(shapes)
        return self._slots

    def _make_slots(self, shapes: Mapping[str, tuple[int, ...]]) -> SlotSender:
        return SlotSender(shapes, self._dtype)

    def _abandon(self, channel: Channel, version: int, error: BaseException) -> None:
        """End a stream that failed. A process that cannot be told has ended, and the next one needs weights anyway."""
        if isinstance(error, WeightsIncomplete):  # the engine has ended the stream itself
            channel.incomplete()
            return
        with suppress(HeadwaterError, CancelledError):
            body = {"error": f"{type(error).__name__}: {error}"}
            if answer(channel, ControlCall("/control/finish_weight_update", body), version)["needs_weights"]:
                channel.incomplete()


class SlotSender:
    """Two slots, and how they are filled."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.slot_bytes = slot_size(shapes, dtype)
        self._segment: Segment | None = Segment(NUM_SLOTS * self.slot_bytes)
        self._pinned: Tensor | None = None
        try:
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
        devices: set[torch.device] = set()
        until_free(slot)
        for bucket in buckets:
            for name, tensor in bucket:
                num_bytes = _padded(tensor.numel() * self.dtype.itemsize)
                if end + num_bytes > self.slot_bytes:
                    if num_bytes > self.slot_bytes:
                        raise WeightsError(f"{name} of shape {tuple(tensor.shape)}: is larger than was announced")
                    _until_copied(devices)
                    yield slot, entries
                    slot, entries, end = (slot + 1) % NUM_SLOTS, [], 0
                    until_free(slot)
                place = slot * self.slot_bytes + end
                self._write(place, tensor)
                devices.add(tensor.device)
                entries.append(asdict(SlotEntry(name, tuple(tensor.shape), end)))
                end += num_bytes
        if entries:
            _until_copied(devices)
            yield slot, entries

    def _write(self, place: int, tensor: Tensor) -> None:
        write_tensor(self._buffer, place, tensor, self.dtype, is_pinned=self._pinned is not None)

    def close(self) -> None:
        """Remove the segment. Closing twice is allowed."""
        _unpin(self._pinned)
        self._pinned = None
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    @property
    def _buffer(self) -> memoryview:
        assert self._segment is not None, "closed"
        return self._segment.buffer


class SlotReceiver:
    """The engine's end of one update. ``buckets`` runs on the engine's thread, everything else on any other."""

    def __init__(
        self,
        name: str,
        slot_bytes: int,
        dtype: torch.dtype,
        *,
        previous: SlotReceiver | None = None,
        map_memory: Callable[[str, int], Memory] | None = None,
    ) -> None:
        """``previous`` received the update before this one; a segment that is used again stays mapped.

        ``map_memory`` opens the memory of that name and size, by default a segment of main memory.
        """
        self._segment = (name, NUM_SLOTS * slot_bytes)
        self._memory: Memory
        if previous is not None and previous._segment == self._segment:
            self._memory = previous._memory
        else:
            self._memory = (map_memory or MappedMemory)(*self._segment)
        self._slot_bytes = slot_bytes
        self._dtype = dtype
        self._changed = threading.Condition()
        self._filled: deque[tuple[Bucket, Future[None]]] = deque()
        self._is_finished = False
        self._failure: WeightsError | None = None

    def update(self, version: int, shapes: Mapping[str, tuple[int, ...]]) -> WeightUpdate:
        """What arrives, for an engine."""
        return WeightUpdate(version, shapes, self.buckets())

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
                self._memory.until_read()
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
            what = "the engine waits for the next weights of an update, whose sender may have ended"
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
        return self._memory.view(place, count, self._dtype).view(entry.shape)


class Memory(Protocol):
    """Memory of the sender that this process has mapped."""

    def view(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        """Numbers that begin at the byte ``place``."""
        ...

    def until_read(self) -> None:
        """Wait until copies from it have ended."""
        ...


class MappedMemory:
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
        if (pinned := _pin(self.buffer)) is not None:
            weakref.finalize(self, _unpin, pinned)  # also when the interpreter ends, before CUDA does

    def view(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=place)

    def until_read(self) -> None:
        """The receiver has waited for its copies already."""


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _until_copied(devices: Iterable[torch.device]) -> None:
    """Wait for the copies of a whole slot at once: waiting for each tensor would leave the bus idle in between."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _pin(buffer: memoryview | mmap.mmap) -> Tensor | None:
    """Lock memory for fast copies from and to a GPU, if this process uses one. Without it copies are slower."""
    device = _device_in_use()
    if device is None:
        return None
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
        if status != 0:
            logger.warning("shared memory for weights is not pinned, so copies are slower: CUDA error %d", status)
            _clear_cuda_error()
            return None
    return memory


def _clear_cuda_error() -> None:
    """CUDA remembers the error of a failed call, and the next kernel would report it as its own."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unpin(memory: Tensor | None) -> None:
    if memory is not None and (device := _device_in_use()) is not None:
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _device_in_use() -> int | None:
    """A GPU that this process uses already: any other would give it memory for a context that nothing else needs."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    devices = range(torch.cuda.device_count())
    return next((device for device in devices if _has_context(device)), None)


def _has_context(device: int) -> bool:
    return bool(torch._C._cuda_hasPrimaryContext(device))  # type: ignore[attr-defined]
