"""Handles Ctrl-C, termination and a closed terminal, only where the run is in a consistent state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from headwater.core.import_guard import ImportGuard


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
