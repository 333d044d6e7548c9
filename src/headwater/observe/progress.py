"""Console output: the progress of a run, and output that does not stop the work when its reader disappears.

Rich is imported only when something is shown, because every command imports this file.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from headwater.observe.status_file import StageProgress

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.progress import Progress

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


class Reporter(Protocol):
    """Receives the progress of one stage."""

    def update(self, done: int, shown: Mapping[str, str]) -> None: ...


class Display:
    """Prints to one console. Each stage of work has a progress bar, one at a time.

    If standard output breaks, the run continues without a display.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or lasting_console()
        self.stage_now: StageProgress | None = None
        """The current stage, for other threads to read."""

    def say(self, message: str) -> None:
        """Print a line as it is. It may quote anything, so brackets in it are not rich's markup."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int, start: int = 0) -> Iterator[Reporter]:
        self.stage_now = StageProgress(name, start, total)
        try:
            with self._shown(name, total, start) as shown:
                yield _Noted(self, shown)
        finally:
            self.stage_now = None

    @contextmanager
    def _shown(self, name: str, total: int, start: int) -> Iterator[Reporter]:
        if self.console.is_terminal:
            from rich.live import Live
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
            )
            bar = _Bar(Progress(*columns, console=self.console), name, total, start)
            with Live(bar, console=self.console, refresh_per_second=8):
                yield bar
        elif self.console.is_jupyter:
            yield _Cell(name, total, start)
        else:
            yield _Lines(self.console, name, total, start)


def _join(shown: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in shown.items())


class _Noted:
    """Forwards progress, and records it in ``Display.stage_now``."""

    def __init__(self, display: Display, shown: Reporter) -> None:
        self._display = display
        self._shown = shown

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        if self._display.stage_now is not None:
            self._display.stage_now = replace(self._display.stage_now, done=done)
        self._shown.update(done, shown)


class _Bar:
    """A bar with the numbers below it, so that both fit a narrow terminal."""

    def __init__(self, progress: Progress, name: str, total: int, start: int) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total, completed=start)
        self._numbers = ""

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        self._progress.update(self._task, completed=done)
        self._numbers = "  " + _join(shown)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        return Group(self._progress, Text(self._numbers))


class _Lines:
    """For logs and CI: the first step, the last step, and one line every few seconds."""

    def __init__(self, console: Console, name: str, total: int, start: int) -> None:
        self._console = console
        self._name = name
        self._total = total
        self._first = start + 1
        self._last_printed = time.monotonic()

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        now = time.monotonic()
        if done in (self._first, self._total) or now - self._last_printed >= _LOG_EVERY_S:
            self._last_printed = now
            line = f"{self._name} {done}/{self._total}  {_join(shown)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Cell:
    """For notebooks: one line below the cell, which is replaced."""

    def __init__(self, name: str, total: int, start: int) -> None:
        from IPython.display import display

        self._name = name
        self._total = total
        self._shown = display({"text/plain": f"{name} {start}/{total}"}, raw=True, display_id=True)

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        self._shown.update({"text/plain": f"{self._name} {done}/{self._total}  {_join(shown)}"}, raw=True)


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
    return Console(file=cast(TextIO, LastingOutput(sys.stdout)), emoji=False)
