"""Output of work that goes on when nobody reads it any more."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


class LastingOutput:
    """A text file that can always be written: once its reader or its terminal is gone, what is written is lost.

    ``| head`` closes a pipe, a dropped connection takes its terminal along; what the work has to keep is in files.
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
        logger.info("output is given up: %s", error)
        discard(self._file)


def discard(file: TextIO) -> None:
    """Let ``file`` go nowhere: what is in its buffer, and what others print to it, would fail once more."""
    try:
        descriptor = file.fileno()
    except (OSError, ValueError):  # it is in memory
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def lasting_console() -> Console:
    """Standard output, for commands that do more than print."""
    from rich.console import Console

    if sys.stdout is None:  # it was closed before we began
        return Console(quiet=True)
    return Console(file=cast(TextIO, LastingOutput(sys.stdout)))
