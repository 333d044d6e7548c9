"""The folder of one run: everything it writes, and nothing it overwrites."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headwater.core.errors import RunError
from headwater.observe.json_lines import last_records
from headwater.observe.whole_file import write_whole

logger = logging.getLogger(__name__)


class RunDirectory:
    """``runs/<name>/``: config.yaml, metrics.jsonl, ledger.jsonl, status.json, reward.png, the folders rollouts, eval
    and checkpoints, and trace.json where it was asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path, name: str) -> RunDirectory:
        """A new folder: ``name``, or ``name-2``, ``name-3``, ... where that exists."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = root / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir()
                    return cls(path)
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise RunError(f"run.root = {root}: cannot create {name!r} there: {error.strerror or error}") from error

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        if not (path / "config.yaml").is_file():
            raise RunError(
                f"{path}: no run there (config.yaml is missing); give a folder that `headwater train` made, "
                "for example runs/quickstart"
            )
        return cls(path)

    @property
    def config_files(self) -> list[Path]:
        """``config.yaml``, and those that a resume with other settings wrote beside it, oldest first."""
        later = sorted(self.path.glob("config-*.yaml"), key=lambda path: int(path.stem.partition("-")[2]))
        return [self.path / "config.yaml", *later]

    @property
    def config_file(self) -> Path:
        """The settings the run goes by now."""
        return self.config_files[-1]

    def write_config(self, text: str) -> None:
        """Keep ``text`` as the run's settings; earlier ones stay beside it."""
        if not self.config_file.exists() or self.config_file.read_text(encoding="utf-8") != text:
            write_whole(self.free_file(".", "config", ".yaml"), text)

    @property
    def reference(self) -> Path:
        """The policy that training is kept near, where a supervised start came before it."""
        return self.path / "reference"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger_file(self) -> Path:
        """What became of every prompt that was dispatched, one line per step."""
        return self.path / "ledger.jsonl"

    @property
    def status_file(self) -> Path:
        """What the run does at this moment, or did last."""
        return self.path / "status.json"

    def free_trace_file(self) -> Path:
        """``trace.json``, or another name where an earlier part of the run has left one."""
        return self.free_file(".", "trace", ".json")

    @property
    def curve_file(self) -> Path:
        return self.path / "reward.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        """Steps that can be resumed, oldest first."""
        names = (path.name.removeprefix("step_") for path in self.checkpoints.glob("step_*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def model(self, step: int) -> Path:
        """The model after ``step``, in Hugging Face format, where a checkpoint keeps it."""
        return self.checkpoint(step) / "model"

    def free_file(self, folder: str, stem: str, suffix: str) -> Path:
        """A path in ``folder`` that does not exist yet; a second file of the same stem gets a number."""
        parent = self.path / folder
        parent.mkdir(exist_ok=True)
        path, number = parent / f"{stem}{suffix}", 1
        while path.exists():
            number += 1
            path = parent / f"{stem}-{number}{suffix}"
        return path

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        _append(self.metrics_file, record)

    def append_ledger(self, record: Mapping[str, Any]) -> None:
        _append(self.ledger_file, record)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of the run as it stands: what a resume went back behind is left out."""
        return _as_it_stands(_read(self.metrics_file))

    def read_ledger(self) -> list[dict[str, Any]]:
        """As ``read_metrics``: one record per step, and what ended in it."""
        return _as_it_stands(_read(self.ledger_file))

    def last_metrics(self, count: int) -> list[dict[str, Any]]:
        """``read_metrics`` of the last ``count`` lines alone, however long the file is."""
        return _as_it_stands(last_records(self.metrics_file, count))

    def last_ledger(self, count: int) -> list[dict[str, Any]]:
        """``read_ledger`` of the last ``count`` lines alone."""
        return _as_it_stands(last_records(self.ledger_file, count))


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """One line, written at once, so that a run that is killed loses none of its history."""
    line = json.dumps(record) + "\n"
    with path.open("a+b") as file:
        # A process killed in mid-line leaves it open; the next record must not be glued to it.
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode())


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            logger.warning("%s:%d is cut off, as a killed process leaves it; skipped", path, number)
    return records


def _as_it_stands(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        if record["kind"] == "resume":
            latest = {key: each for key, each in latest.items() if each["step"] <= record["step"]}
        else:
            latest[record["kind"], record["step"]] = record
    return list(latest.values())
