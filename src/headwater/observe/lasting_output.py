"""Console output that does not stop the work when its reader disappears."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


class LastingOutput:
    """A text stream that never fails. Once its reader or terminal is gone, further output is discarded.

    For example, ``| head`` closes a pipe, and a lost connection closes a terminal. Everything important is in files.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_gone = False

    @property
    def encoding(self) -> str:
        return self._file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        if not self._is_gone:
            try:
                self._file.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_gone:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_gone = True
        logger.info("standard output is closed, output is discarded: %s", error)
        discard(self._file)


def discard(file: TextIO) -> None:
    """Redirect ``file`` to the null device, because its buffer and later output of others would fail again."""
    try:
        descriptor = file.fileno()
    except (OSError, ValueError):  # not a real file
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def lasting_console() -> Console:
    """Standard output, for commands whose work must continue without it."""
    from rich.console import Console

    if sys.stdout is None:  # it was closed before the process started
        return Console(quiet=True)
    return Console(file=cast(TextIO, LastingOutput(sys.stdout)))
