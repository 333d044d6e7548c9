"""Progress output of a run: a live bar in a terminal, or a line every few seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from headwater.observe.lasting_output import lasting_console
from headwater.observe.status_file import StageProgress

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
        self.console.print(message, highlight=False, soft_wrap=True)

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
        self._numbers = Text("")

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        self._progress.update(self._task, completed=done)
        self._numbers = Text("  " + _join(shown))

    def __rich__(self) -> Group:
        return Group(self._progress, self._numbers)


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
            self._console.print(f"{self._name} {done}/{self._total}  {_join(shown)}", highlight=False, soft_wrap=True)
