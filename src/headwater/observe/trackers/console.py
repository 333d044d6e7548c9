"""All metrics of every step, printed on one line. The progress display shows only a few of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.observe.progress import Display
from headwater.observe.trackers import TRACKERS, TableRecords


@TRACKERS.register
class Console:
    def __init__(self, *, only: tuple[str, ...] = ()) -> None:
        """``only`` lists beginnings of names, for example [reward/, eval/reward/, time/step_s]; empty prints all
        metrics."""
        self._only = tuple(only)
        self.display: Display | None = None
        """The display of the run, which the progress bar is on. Without one, standard output is used."""

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        self.display = self.display or Display()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = [f"{name}:{_short(value)}" for name, value in metrics.items() if self._wants(name)]
        if shown:
            self._say(f"step:{step} - " + " - ".join(shown))

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        for number, row in enumerate(rows, start=1):
            self._say(f"step:{step} - {name} {number}: " + ", ".join(f"{key}={text!r}" for key, text in row.items()))

    def finish(self) -> None: ...

    def _wants(self, name: str) -> bool:
        return not self._only or name.startswith(self._only)

    def _say(self, line: str) -> None:
        assert self.display is not None, "started before"
        self.display.console.print(line, highlight=False, soft_wrap=True, markup=False)


def _short(value: float) -> str:
    is_whole = math.isfinite(value) and float(value).is_integer() and abs(value) < 1e15
    return f"{int(value)}" if is_whole else f"{value:.4g}"
