"""What the threads of a run share: signals, turns of the interpreter, and garbage collection.

Ctrl-C, termination and a closed terminal interrupt no import, and a run only where it is consistent. Some libraries
catch every exception while they are imported. For example, numpy ignores a KeyboardInterrupt, and torch mistakes it for
a missing optional module and fails later with an AttributeError. ``ImportGuard`` defers a signal until the import has
finished. ``Interrupts`` defers it until a training step or a checkpoint is complete.

Python collects no garbage among the objects of the imports, and none while many short-lived objects exist.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

_EVERY_S = 0.02
_IMPORT_MACHINERY = "<frozen importlib._bootstrap>"


def is_importing(frame: FrameType | None) -> bool:
    """Whether the code that a signal has interrupted, ``frame``, runs as part of an import."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_MACHINERY:
            return True
        frame = frame.f_back
    return False


class ImportGuard:
    """Defers the signals of one handler while an import runs.

        def handle(number, frame):
            if not guard.defers(number, frame):
                raise KeyboardInterrupt

    A second signal is not deferred, because the import may hang.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        """Whether a signal was deferred and has not been delivered yet."""
        self._is_repeated = False

    def defers(self, number: int, frame: FrameType | None) -> bool:
        """Whether ``frame`` is part of an import. If it is, the signal is sent again until the import has finished."""
        is_second = self.is_waiting and not self._is_repeated
        self._is_repeated = False
        self.is_waiting = is_importing(frame) and not is_second
        if self.is_waiting:
            # threading.Thread.start acquires a lock that the interrupted code may hold, so use the lower-level call.
            _thread.start_new_thread(self._repeat, (number,))
        return self.is_waiting

    def _repeat(self, number: int) -> None:
        time.sleep(_EVERY_S)
        if self.is_waiting:
            self._is_repeated = True
            # A real signal also wakes the main thread if the import has finished and a system call blocks.
            main = threading.main_thread().ident
            assert main is not None  # the main thread has been started
            signal.pthread_kill(main, number)


class Interrupts:
    """Turns SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt: immediately, or at the end of a ``deferred`` block.

    A second signal within the block is not deferred, so that a person can always stop the run. SIGHUP never counts as a
    second signal, because a closing terminal and its shell both send it. If SIGHUP is ignored, as under nohup, it stays
    ignored.
    """

    def __init__(self, on_deferred: Callable[[str], None]) -> None:
        """``on_deferred`` is called with the name of the work that is finished first."""
        self._on_deferred = on_deferred
        self._depth = 0
        self._doing = ""
        self._waiting = False
        self._imports = ImportGuard()

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets only the main thread handle signals
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous: dict[int, Any] = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                if signal.getsignal(number) is not signal.SIG_IGN:  # the terminal has closed, and may send it again
                    signal.signal(number, handler)

    @contextmanager
    def deferred(self, doing: str) -> Iterator[None]:
        """Finish this block before an interrupt is raised: ``with interrupts.deferred("this update")``."""
        self._depth += 1
        self._doing = doing
        try:
            yield
        finally:
            self._depth -= 1
        if self._waiting and self._depth == 0:
            self._waiting = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if self._waiting:
                return
            number = signal.SIGTERM  # a signal that is deferred below is sent again with this number
        if self._depth == 0 or self._waiting:
            # A library may import modules late, for example at the first batch.
            if self._imports.defers(number, frame):
                return
            self._waiting = False
            raise KeyboardInterrupt
        self._waiting = True
        self._on_deferred(self._doing)


_SWITCH_S = 0.0005
_NUM_NEW_OBJECTS = 50_000


@contextmanager
def sharing_interpreter() -> Iterator[None]:
    """Let a thread that becomes ready run after half a millisecond at most, not five, and collect garbage rarely.

    A run has three busy threads: the trainer, the engine and the episodes. Each of them often waits for a moment, for a
    socket or for the device, and afterwards has to wait until the thread that runs gives up the interpreter. With the
    default interval of 5 ms, a hundred short messages to a reward worker take half a second while the engine generates.

    Thousands of open episodes are many objects, of which few are garbage. By default, Python looks for garbage after
    every 700 new objects. The trainer calls ``collect_young_garbage`` after each step.
    """
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(before, _SWITCH_S))
    gc.set_threshold(max(thresholds[0], _NUM_NEW_OBJECTS), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(before)


def collect_young_garbage() -> None:
    """Collect garbage of a step that has ended, among the objects that were created since the last call.

    So tensors in reference cycles live for a step at most, although collections are otherwise rare. Every tenth call
    makes Python look through all objects soon afterwards.
    """
    gc.collect(1)


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
