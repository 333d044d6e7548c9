"""The values that were used last, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Values by key, of which those used longest ago are dropped. May be used by several threads.

        pages = ByteCache[str, bytes](max_bytes=2**20, size=len)
        page = pages.get_or_load(url, lambda: download(url))

    A value that does not fit alone is not kept, and drops no others. A pickled cache is empty when it arrives.
    """

    def __init__(self, max_bytes: int, size: Callable[[Value], int]) -> None:
        """``size`` is called once for each value. If the cache is pickled, it must be a function of a module."""
        self.max_bytes = max_bytes
        self._size = size
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __contains__(self, key: Key) -> bool:
        """Whether a value is kept. This is no use of it."""
        return key in self._entries

    def get(self, key: Key) -> Value | None:
        with self._lock:
            return self._used(key)

    def get_or_load(self, key: Key, load: Callable[[], Value]) -> Value:
        """Two threads that need the same new value may both load it, because loading one must not delay others."""
        known = self.get(key)
        return self.put(key, load()) if known is None else known

    def put(self, key: Key, value: Value, in_use: Container[Key] = ()) -> Value:
        """Keep a value unless the key has one. Return the value of the key, so that equal values share their memory.

        Values of keys ``in_use`` are kept, also if all of them together need more than ``max_bytes``.
        """
        with self._lock:
            known = self._used(key)
            if known is not None:
                return known
            size = self._size(value)
            if size > self.max_bytes and key not in in_use:
                return value
            self._entries[key] = value, size
            self._num_bytes += size
            self._shrink(in_use)
            return value

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _used(self, key: Key) -> Value | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def _shrink(self, in_use: Container[Key]) -> None:
        if self._num_bytes <= self.max_bytes:
            return
        for key in list(self._entries):
            if key not in in_use:
                self._num_bytes -= self._entries.pop(key)[1]
                if self._num_bytes <= self.max_bytes:
                    return

    def __reduce__(self) -> tuple[type[ByteCache[Key, Value]], tuple[int, Callable[[Value], int]]]:
        # Neither a lock nor megabytes of values should travel.
        return type(self), (self.max_bytes, self._size)
