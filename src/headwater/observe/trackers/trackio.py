"""Trackio: a local database (``trackio show``), or a Space of the Hugging Face hub with ``space_id``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.observe.trackers import TRACKERS, TableRecords, require


@TRACKERS.register
class Trackio:
    def __init__(self, *, space_id: str | None = None, group: str | None = None) -> None:
        """As in ``trackio.init``. The variable TRACKIO_DIR is the folder of the local database."""
        require("trackio", "trackio")
        self._options = {"space_id": space_id, "group": group}
        self._run: Any = None

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        import trackio

        self._run = trackio.init(
            project=project,
            name=name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **self._options,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        import trackio

        columns = list(rows[0]) if rows else []
        table = trackio.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self) -> None:
        self._run.finish()
