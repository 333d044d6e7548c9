"""What a person sees while a run trains: a live bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LOG_EVERY_S = 10.0


class Reporter(Protocol):
    """Receives the progress of one stage."""

    def update(self, done: int, shown: Mapping[str, str]) -> None: ...


class Display:
    """Prints to one console; stages of work show their own bar, one at a time."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def say(self, message: str) -> None:
        self.console.print(message, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int, start: int = 0) -> Iterator[Reporter]:
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self.console) as progress:
                task = progress.add_task(name, total=total, completed=start, shown="")
                yield _Bar(progress, task)
        else:
            yield _Lines(self.console, name, total, start)


def _join(shown: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in shown.items())


class _Bar:
    def __init__(self, progress: Progress, task: object) -> None:
        self._progress = progress
        self._task = task

    def update(self, done: int, shown: Mapping[str, str]) -> None:
        text = "  ".join(f"[dim]{name}[/] {value}" for name, value in shown.items())
        self._progress.update(self._task, completed=done, shown=text)  # type: ignore[arg-type]


class _Lines:
    """For logs and CI: the first step, the last, and one every few seconds between."""

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
