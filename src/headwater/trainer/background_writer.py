"""Writes the records of a step while the next one begins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from headwater.core.waits import wait_until

_MOST_WAITING = 8
_LIMIT_S = 1800.0
"""A disk that takes longer does not answer any more."""


class BackgroundWriter:
    """Runs functions that write, one at a time and in order, in a thread.

        writer.put(lambda: run.append_metrics(record))
        writer.flush()                                    # everything so far is written, or the error is raised

    After an error nothing else is written, because records would be missing between others. Every later call raises
    the error, so that no step follows one that was not recorded. A file that is ``alone`` is no such record: if it
    cannot be written, ``check`` and ``flush`` raise the error, and the records after it are still written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], Any], bool]] = deque()
        self._is_writing = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._is_broken = False
        """Nothing else is written."""
        self._thread: threading.Thread | None = None

    def put(self, write: Callable[[], Any], *, alone: bool = False) -> None:
        """Have ``write()`` called. Waits while many others wait, so that a slow disk slows the run down."""
        self._wait(lambda: len(self._waiting) < _MOST_WAITING, "for room in the queue of records to write")
        with self._changed:
            if self._is_broken and self._error is not None:
                raise self._error
            self._waiting.append((write, alone))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headwater-records", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def flush(self) -> None:
        """Wait until everything is written."""
        self.settle()
        self.check()

    def settle(self) -> None:
        """Wait until everything is written that can be, and raise nothing."""
        self._wait(lambda: not self._waiting and not self._is_writing, "for records that are being written")

    def close(self) -> BaseException | None:
        """Write what waits and end the thread. Returns the error of a write, which ``flush`` would raise."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LIMIT_S)
        return self._error

    def _wait(self, predicate: Callable[[], bool], what: str) -> None:
        with self._changed:
            wait_until(
                self._changed,
                lambda: self._is_broken or predicate(),
                lambda: f"the run waits {what}",
                kind="records",
                hard_limit_s=_LIMIT_S,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._is_writing = False
                    self._changed.notify_all()
                    if self._is_closed:
                        return
                    self._changed.wait()
                self._is_writing = True
                write, is_alone = self._waiting.popleft()
            try:
                write()
            except BaseException as error:  # noqa: BLE001  raised by the next call
                with self._changed:
                    self._error = self._error or error
                    if is_alone:
                        continue
                    self._is_broken = True
                    self._waiting.clear()
                    self._changed.notify_all()
                return
