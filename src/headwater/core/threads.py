"""How the threads of a run share the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH_S = 0.0005


@contextmanager
def sharing_interpreter() -> Iterator[None]:
    """Let a thread that becomes ready run after half a millisecond at most, instead of five.

    A run has three busy threads: the trainer, the engine and the episodes. Each of them often waits for a moment, for a
    socket or for the device, and afterwards has to wait until the thread that runs gives up the interpreter. With the
    default interval of 5 ms, a hundred short messages to a reward worker take half a second while the engine generates.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
