"""The engine's weights, its device memory, which ``sleep`` releases and ``wake`` allocates, and garbage collection."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headwater.core.errors import BaseMissing, ConfigError, MemoryRefused
from headwater.core.protocols import ALL_TAGS, MemoryTag, WeightUpdate
from headwater.engine.kv_cache import KVCache, free_bytes
from headwater.engine.loop import EngineLoop
from headwater.models.checksum import checksum
from headwater.weights.memory import Receiver

_GIB = 2**30
_lock = threading.Lock()
_num_putting_off = 0
_was_enabled = True


class ModelWeights:
    """The weights an engine holds: replaced by updates, and moved to main memory while it sleeps."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._has_all = False
        """An update of all weights has been taken. Adapters alone belong to the weights of such an update."""
        self._parked: dict[str, Tensor] = {}
        self._change = threading.Lock()
        """Held while weights change or move, and while a checksum reads them."""

    def receiver(self, shapes: Mapping[str, tuple[int, ...]], *, adapters_alone: bool = False) -> Receiver:
        """What takes an update of these tensors; ``WeightsError`` if they do not fit the model."""
        if adapters_alone and not self._has_all:
            raise BaseMissing("the engine has not been given the weights that the adapters belong to; send all weights")
        return Receiver(self._model, shapes, adapters_alone=adapters_alone)

    def take(self, receiver: Receiver, update: WeightUpdate) -> None:
        """Copy an update into the model. Its tensors may change again when this returns."""
        with self._change:
            try:
                receiver.take_all(update)
                self._has_all = self._has_all or not update.adapters_alone
            finally:
                self._synchronize()

    def checksum(self) -> str:
        """The checksum of the present weights, awake or asleep. Generation continues meanwhile; an update waits."""
        with self._change:
            return checksum(self._parked.items() or self._model.named_parameters())

    @torch.no_grad()
    def park(self) -> None:
        """Move the weights to main memory and release their memory on the device."""
        if self._device.type == "cpu":
            return  # they are already in main memory
        with self._change:
            for name, parameter in self._model.named_parameters():
                self._parked[name] = parameter.detach().to("cpu", copy=True)
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def unpark(self) -> None:
        """Move the weights back to the device: the same tensors at new addresses."""
        if self._device.type == "cpu":
            return
        with self._change:
            for name, parameter in self._model.named_parameters():
                storage, parked = parameter.untyped_storage(), self._parked[name]
                # Merged weights share one storage, which must reach to the end of the last one.
                needed = (parameter.storage_offset() + parameter.numel()) * parameter.element_size()
                if storage.nbytes() < needed:
                    storage.resize_(needed)
                parameter.copy_(parked)
            self._synchronize()  # a checksum reads them on another stream
            self._parked.clear()  # last, so that waking can be retried if memory runs out

    def _synchronize(self) -> None:
        """Wait for this thread's work. A learner that trains on another stream is not waited for."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class DeviceMemory:
    """The KV cache and the weights on the device. ``sleep`` and ``wake`` run on the loop's thread."""

    def __init__(self, loop: EngineLoop, cache: KVCache, weights: ModelWeights, num_weight_bytes: int) -> None:
        self._loop = loop
        self._cache = cache
        self._weights = weights
        self._device = cache.spec.device
        self._num_bytes: dict[MemoryTag, int] = {"kv_cache": cache.num_bytes, "weights": num_weight_bytes}
        self._asleep: set[MemoryTag] = set()

    def is_asleep(self, tag: MemoryTag) -> bool:
        return tag in self._asleep

    def sleep(self, tags: Sequence[MemoryTag]) -> None:
        loop = self._loop
        loop.is_asleep = True
        loop.interrupt()
        loop.scheduler.pool.forget()
        loop.runner.synchronize()  # what is freed here may be reused at once, on another stream
        loop.runner.forget_addresses()
        for tag in tags:
            if tag not in self._asleep:
                self._give_back(tag)
                self._asleep.add(tag)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate one tag after another. If memory runs out, the tags allocated so far stay awake."""
        for tag in tags:
            if tag in self._asleep:
                try:
                    self._take_again(tag)
                except (torch.OutOfMemoryError, MemoryError) as error:
                    raise self._refusal(tag) from error
                self._asleep.remove(tag)
        self._loop.is_asleep = bool(self._asleep)

    def _give_back(self, tag: MemoryTag) -> None:
        if tag == "kv_cache":
            self._cache.free()
        else:
            self._weights.park()

    def _take_again(self, tag: MemoryTag) -> None:
        if tag == "kv_cache":
            self._cache.allocate_again()
        else:
            self._weights.unpark()

    def _refusal(self, tag: MemoryTag) -> MemoryRefused:
        return MemoryRefused(
            f"wake: {tag} needs {self._num_bytes[tag] / _GIB:.2f} GiB, but only "
            f"{free_bytes(self._device) / _GIB:.2f} GiB are free on {self._device}; the engine stays asleep; free "
            "memory on that device, then call wake again"
        )


def check_tags(tags: Sequence[MemoryTag]) -> None:
    unknown = [tag for tag in tags if tag not in ALL_TAGS]
    if unknown or not tags:
        raise ConfigError([f"tags = {list(tags)}: must be one or more of {', '.join(ALL_TAGS)}"])


@cache
def settle_garbage() -> None:
    """Exclude all existing objects from garbage collection, once per process.

    Importing torch and transformers creates about half a million objects. Without this, the collector scans them
    repeatedly in the middle of decoding rounds, more often with more requests.
    """
    gc.collect()
    gc.freeze()
    # Some extension modules print warnings at exit about objects that still exist.
    atexit.register(gc.unfreeze)


@contextmanager
def garbage_put_off() -> Iterator[None]:
    """Disable garbage collection inside the block.

    With a thousand open requests, one collection takes longer than swapping the weights. The switch applies to the
    whole process: if several engines are inside the block, the last one to leave enables collection again.
    """
    global _num_putting_off, _was_enabled
    with _lock:
        if not _num_putting_off:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_putting_off += 1
    try:
        yield
    finally:
        with _lock:
            _num_putting_off -= 1
            if not _num_putting_off and _was_enabled:
                gc.enable()
