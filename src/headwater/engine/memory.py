"""The engine's weights, and its device memory, which ``sleep`` releases and ``wake`` allocates."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.core.capabilities import ALL_TAGS, MemoryTag
from headwater.core.errors import BaseMissing, ConfigError, MemoryRefused, WeightsIncomplete
from headwater.core.protocols import WeightUpdate
from headwater.engine.kv_cache import KVCache, free_bytes
from headwater.engine.loop import EngineLoop
from headwater.models.checksum import checksum
from headwater.models.pinned import PinnedMemory
from headwater.models.virtual_memory import AddressRange
from headwater.weights.memory import Receiver

_GIB = 2**30
_ALIGNMENT = 512
"""Every storage starts at a multiple of this many bytes, as with torch's allocator."""


class ModelWeights:
    """The weights an engine holds: replaced by updates, and moved to main memory while it sleeps."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._has_all = False
        """An update of all weights has been taken. Adapters alone belong to the weights of such an update."""
        self._parked: dict[str, Tensor] = {}
        self._homes: dict[str, Tensor] = {}
        """Page-locked main memory for each weight that has been parked, kept for the next time."""
        self._pinned: PinnedMemory | None = None
        self._range: AddressRange | None = None
        self._change = threading.Lock()
        """Held while weights change or move, and while a checksum reads them."""

    @property
    def keeps_addresses(self) -> bool:
        return self._range is not None or self._device.type == "cpu"

    @property
    def is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @torch.no_grad()
    def fix_addresses(self, views: Iterable[Tensor]) -> None:
        """Move the weights to addresses that stay theirs while they are parked.

        ``views`` are tensors of the runner that share memory with the parameters.
        """
        tensors = [*self._model.parameters(), *views]
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        offsets, num_bytes = {}, 0
        for start, group in by_storage.items():
            offsets[start] = num_bytes
            num_bytes += -(-group[0].untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._range = AddressRange(num_bytes, self._device)
        for start, group in by_storage.items():
            storage = group[0].untyped_storage()
            place = self._range.tensor((storage.nbytes(),), torch.uint8, offsets[start])
            place.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))
            del storage
            for tensor in group:
                moved = place.view(tensor.dtype)
                tensor.data = moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self._synchronize()

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
            if self.is_discarded:
                raise WeightsIncomplete("the engine's weights were discarded; publish new ones first")
            return checksum(self._parked.items() or self._model.named_parameters())

    @property
    def is_discarded(self) -> bool:
        """Released without a copy. They come back with the next update."""
        return self._range is not None and not self._range.is_mapped and not self._parked

    @torch.no_grad()
    def park(self) -> None:
        """Move the weights to main memory and release their memory on the device."""
        if self._device.type == "cpu":
            return  # they are already in main memory
        with self._change:
            parameters = dict(self._model.named_parameters())
            if self._pinned is None:
                self._pinned = PinnedMemory(sum(each.nbytes + 64 for each in parameters.values()))
            for name, parameter in parameters.items():
                if name not in self._homes:
                    self._homes[name] = self._pinned.empty(parameter.shape, parameter.dtype)
                self._parked[name] = self._homes[name].copy_(parameter, non_blocking=True)
            self._synchronize()
            if self._range is not None:
                self._range.unmap()
                return
            for parameter in self._model.parameters():
                parameter.untyped_storage().resize_(0)

    def discard(self) -> None:
        """Release the memory of the weights without a copy. An update must bring all of them back."""
        if self._range is None:
            raise MemoryRefused(
                "discard_weights: the weights have no fixed addresses, which needs a GPU and engine.keep_addresses=true"
            )
        with self._change:
            self._parked.clear()
            self._range.unmap()
            self._has_all = False

    @torch.no_grad()
    def unpark(self) -> None:
        """Move the weights back to the device: the same tensors, at new addresses unless these are fixed."""
        if self._device.type == "cpu":
            return
        with self._change:
            if self._range is not None:
                self._range.map()
            for name, parked in self._parked.items():
                parameter = self._model.get_parameter(name)
                storage = parameter.untyped_storage()
                # Merged weights share one storage, which must reach to the end of the last one.
                needed = (parameter.storage_offset() + parameter.numel()) * parameter.element_size()
                if self._range is None and storage.nbytes() < needed:
                    storage.resize_(needed)
                parameter.copy_(parked, non_blocking=True)
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
        loop.runner.forget_media()
        loop.runner.synchronize()  # what is freed here may be reused at once, on another stream
        if not all(self._keeps_address(tag) for tag in tags):
            loop.runner.forget_addresses()
        for tag in tags:
            if tag not in self._asleep and not (tag == "weights" and self._weights.is_discarded):
                self._give_back(tag)
                self._asleep.add(tag)
        all_keep = all(self._keeps_address(tag) for tag in tags)
        if self._device.type == "cuda" and (not all_keep or loop.runner.media is not None):
            torch.cuda.empty_cache()

    def discard_weights(self) -> None:
        """Release the weights without a copy. Nothing is generated until an update brings all of them."""
        loop = self._loop
        loop.interrupt()
        loop.scheduler.pool.forget()
        loop.runner.forget_media()
        loop.runner.synchronize()
        self._weights.discard()
        loop.needs_weights = True
        self._asleep.discard("weights")

    def restore_discarded(self) -> None:
        """Before an update: the memory that the discarded weights had, with undefined contents."""
        if self._weights.is_discarded:
            try:
                self._weights.unpark()
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise self._refusal("weights") from error

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

    def _keeps_address(self, tag: MemoryTag) -> bool:
        return self._cache.keeps_address if tag == "kv_cache" else self._weights.keeps_addresses

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
