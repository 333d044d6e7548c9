"""Ctrl-C in the middle of an import, put off until the import is over.

Libraries catch whatever is raised while they are imported: numpy loses a KeyboardInterrupt and goes on, torch takes it
for a missing part and fails later with an AttributeError.
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
    """Whether ``frame``, where a signal was taken, runs because of an import."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_MACHINERY:
            return True
        frame = frame.f_back
    return False


class ImportGuard:
    """Puts off the signals of one handler.

        def handle(number, frame):
            if not guard.puts_off(number, frame):
                raise KeyboardInterrupt

    A second signal is never put off: the import may hang.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        """Whether a signal was put off and is still to come."""
        self._is_repeated = False

    def puts_off(self, number: int, frame: FrameType | None) -> bool:
        """Whether ``frame`` is part of an import. The same signal then comes again, until the import is over."""
        is_second = self.is_waiting and not self._is_repeated
        self._is_repeated = False
        self.is_waiting = is_importing(frame) and not is_second
        if self.is_waiting:
            # Not a threading.Thread: to start one takes a lock, which the interrupted code may hold.
            _thread.start_new_thread(self._repeat, (number,))
        return self.is_waiting

    def _repeat(self, number: int) -> None:
        time.sleep(_EVERY_S)
        if self.is_waiting:
            self._is_repeated = True
            # To the thread, not to Python alone: the import may be over, and the main thread asleep in a system call.
            main = threading.main_thread().ident
            assert main is not None  # it runs, or there would be nobody to interrupt
            signal.pthread_kill(main, number)
