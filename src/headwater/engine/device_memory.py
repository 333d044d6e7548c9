"""What the engine holds on its device: in place, or given back while it sleeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.core.errors import ConfigError, MemoryRefused
from headwater.core.protocols import ALL_TAGS, MemoryTag
from headwater.engine.free_memory import free_bytes
from headwater.engine.kv_cache import KVCache
from headwater.engine.loop import EngineLoop
from headwater.engine.model_weights import ModelWeights

_GIB = 2**30


class DeviceMemory:
    """The KV cache and the weights. ``sleep`` and ``wake`` run on the loop's thread."""

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
        loop.runner.forget_addresses()
        for tag in tags:
            if tag not in self._asleep:
                self._give_back(tag)
                self._asleep.add(tag)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Tag by tag: what has been taken again before memory runs out stays, and the rest can be asked for later."""
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
            f"wake: {tag} takes {self._num_bytes[tag] / _GIB:.2f} GiB and {free_bytes(self._device) / _GIB:.2f} GiB "
            f"are free on {self._device}; the engine stays asleep: free memory there, then wake it again"
        )


def check_tags(tags: Sequence[MemoryTag]) -> None:
    unknown = [tag for tag in tags if tag not in ALL_TAGS]
    if unknown or not tags:
        raise ConfigError([f"tags = {list(tags)}: must be one or more of {', '.join(ALL_TAGS)}"])
