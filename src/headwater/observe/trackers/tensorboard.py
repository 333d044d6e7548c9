"""TensorBoard event files in the run directory: ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.observe.trackers import TRACKERS, TableRecords, require


@TRACKERS.register
class TensorBoard:
    def __init__(self, *, folder: str = "") -> None:
        """``folder`` is the folder of event files, under which each run gets its own; empty means the run directory."""
        require("tensorboard", "tensorboard")
        self._folder = Path(folder).expanduser() if folder else None
        self._place = ""
        self._config = ""
        self._opened: Any = None

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        from headwater.config import yaml12

        self._place = str(folder if self._folder is None else self._folder / project / name)
        self._config = "\n".join(f"    {line}" for line in yaml12.dump(config).splitlines())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # The metrics of training of that step are an earlier process's, if this one begins with an evaluation.
        writer = self._writer(step, keeps_step=all(name.startswith("eval/") for name in metrics))
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        if rows:
            columns = list(rows[0])
            lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
            text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
            writer = self._writer(step, keeps_step=True)
            writer.add_text(name, text, step)
            writer.flush()

    def finish(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _writer(self, step: int, *, keeps_step: bool) -> Any:
        """The writer, opened at the first step that this process tells of.

        After a resume, TensorBoard shows from this step on only what this process writes; with ``keeps_step``, from the
        next one.
        """
        if self._opened is None:
            from torch.utils.tensorboard import SummaryWriter

            self._opened = SummaryWriter(self._place, purge_step=step + keeps_step)
            self._opened.add_text("config", self._config, step)
        return self._opened


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
