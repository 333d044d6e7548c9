"""The engine's device memory, which ``sleep`` releases and ``wake`` allocates, and Python's garbage collection."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from headwater.core.errors import ConfigError, MemoryRefused
from headwater.core.protocols import ALL_TAGS, MemoryTag
from headwater.engine.kv_cache import KVCache, free_bytes
from headwater.engine.loop import EngineLoop
from headwater.engine.model_weights import ModelWeights

_GIB = 2**30
_lock = threading.Lock()
_num_putting_off = 0
_was_enabled = True


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
