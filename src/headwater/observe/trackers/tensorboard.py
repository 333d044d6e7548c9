"""TensorBoard event files in the run directory: ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.observe.trackers import TRACKERS, Rows, require


@TRACKERS.register
class TensorBoard:
    def __init__(self, *, folder: str = "") -> None:
        """``folder`` is the folder of event files, under which each run gets its own; empty means the run directory."""
        require("tensorboard", "tensorboard")
        self._folder = Path(folder).expanduser() if folder else None
        self._writer: Any = None

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        from headwater.config import yaml12

        place = folder if self._folder is None else self._folder / project / name
        # After a resume, steps from here on replace what an earlier process wrote about them.
        self._writer = SummaryWriter(str(place))
        text = "\n".join(f"    {line}" for line in yaml12.dump(config).splitlines())
        self._writer.add_text("config", text, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, name: str, rows: Rows) -> None:
        if rows:
            columns = list(rows[0])
            lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
            text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
            self._writer.add_text(name, text, step)
            self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
