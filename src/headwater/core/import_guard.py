"""Defers Ctrl-C during an import until the import has finished.

Some libraries catch every exception while they are imported. For example, numpy ignores a KeyboardInterrupt, and torch
mistakes it for a missing optional module and fails later with an AttributeError.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from types import FrameType

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
