"""When Python collects garbage: not among the objects of the imports, and not while many short-lived objects exist."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_lock = threading.Lock()
_num_putting_off = 0
_was_enabled = True


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
    whole process: if several threads are inside the block, the last one to leave enables collection again.
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
