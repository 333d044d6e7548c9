"""One JSON line per record in a file of your choice, with the names that other trackers show, such as eval/reward/mean.

``metrics.jsonl`` of the run directory is always written; this is a second file, for example on a shared disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.observe.trackers import TRACKERS, TableRecords


@TRACKERS.register
class JsonLines:
    def __init__(self, *, path: str = "") -> None:
        """``path`` is the file; empty means tracked.jsonl in the tracker's folder. Several runs may share it."""
        self._path = Path(path).expanduser() if path else None
        self._run: dict[str, str] = {}

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        self._path = self._path or folder / "tracked.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._run = {"project": project, "run": name}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append({"step": step, "metrics": dict(metrics)})

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        self._append({"step": step, "table": name, "rows": [dict(row) for row in rows]})

    def finish(self) -> None: ...

    def _append(self, record: dict[str, Any]) -> None:
        assert self._path is not None, "started before"
        line = json.dumps({**self._run, "time": time.time(), **record}, default=str)
        with self._path.open("a", encoding="utf-8") as file:  # one write, so that the lines of several runs do not mix
            file.write(line + "\n")
