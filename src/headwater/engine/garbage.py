"""When Python may look for garbage: not through what stays for good, and not while generation stands still."""

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
    """Once per process, take what exists by now out of garbage collection.

    Torch and transformers leave half a million objects behind; looking through them again and again, in the middle of
    rounds, takes longer the more requests there are.
    """
    gc.collect()
    gc.freeze()
    # Extension modules complain at exit about objects that are still there.
    atexit.register(gc.unfreeze)


@contextmanager
def garbage_put_off() -> Iterator[None]:
    """No collection meanwhile; one with a thousand requests open takes longer than swapping the weights.

    The switch is the process's: with several engines at it, the last one to leave turns collection on again.
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
