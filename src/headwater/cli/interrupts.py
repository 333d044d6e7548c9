"""Ctrl-C from the first moment of a command to its last."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headwater.cli.exit_codes import EXIT_INTERRUPTED
from headwater.core.import_guard import ImportGuard, is_importing


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, but after an import that is under way; a second one ends the process there."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield  # whoever handles or ignores the signal goes on doing so
        return
    guard = ImportGuard()

    def handle(number: int, frame: FrameType | None) -> None:
        if guard.puts_off(number, frame):
            return
        if is_importing(frame):
            # Raised here it could be lost again, and nothing has begun that would have to be put in order.
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"interrupted\n")
            os._exit(EXIT_INTERRUPTED)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        is_late, guard.is_waiting = guard.is_waiting, False
    if is_late:
        raise KeyboardInterrupt
