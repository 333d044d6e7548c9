"""The run directories in a folder. A run is addressed by its name in the listing, never by a path."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from headwater.core.errors import HeadwaterError
from headwater.dashboard.errors import unknown_run
from headwater.dashboard.record_log import RecordLog
from headwater.dashboard.rollout_files import SOURCES, RolloutFiles, Source
from headwater.dashboard.rollout_index import RolloutIndex
from headwater.dashboard.vocabulary import Vocabulary
from headwater.observe.run_directory import RunDirectory

CONFIG = "config.yaml"


class Run:
    """One run directory, with what was read from it."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.path = path
        self.directory = RunDirectory(path)
        self.records = RecordLog(self.directory.metrics_file)
        self.rollouts: dict[Source, RolloutFiles] = {
            source: RolloutFiles(path, source, lambda: self.records.resumes) for source in SOURCES
        }
        self.index: dict[Source, RolloutIndex] = {
            source: RolloutIndex(files) for source, files in self.rollouts.items()
        }
        self.vocabulary = Vocabulary(self.directory.tokens_file)
        self.lock = threading.Lock()
        """Held while an answer that others may need, too, is computed."""

    def check(self) -> None:
        """Raise ``Refused`` if the run no longer exists."""
        if not (self.path / CONFIG).is_file():
            raise unknown_run(self.name)

    def signature(self) -> tuple[object, ...]:
        """Changes whenever the files do that say how the run is."""
        directory = self.directory
        files = (directory.metrics_file, directory.status_file, directory.ledger_file, self.path / CONFIG)
        return tuple(_stamp(path) for path in files)

    def parts(self) -> dict[str, object]:
        """What can change while a page is open, each with something that differs after a change."""
        directory = self.directory
        return {
            "metrics": _stamp(directory.metrics_file),
            "status": _stamp(directory.status_file),
            "ledger": _stamp(directory.ledger_file),
            "rollouts": _stamp(self.path / "rollouts"),
            "eval": _stamp(self.path / "eval"),
            "config": (_stamp(self.path / CONFIG), _stamp(self.path)),
            "trace": _stamp(self.path / "trace.json"),
        }

    def close(self) -> None:
        for index in self.index.values():
            index.stop()


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


@dataclass(frozen=True)
class Place:
    """What ``headwater ui`` was asked to show."""

    root: Path
    single: str | None
    """The only run that is shown; None for all of ``root``."""

    @classmethod
    def of(cls, path: Path) -> Place:
        """``path`` is a folder of runs, or a run."""
        whole = path.expanduser().absolute()
        if not whole.is_dir():
            raise HeadwaterError(
                f"{path}: no such folder; give a folder of runs or one run, for example: headwater ui runs"
            )
        if (whole / CONFIG).is_file():
            return cls(whole.parent, whole.name)
        return cls(whole, None)


class Runs:
    """Finds the runs of a place, and keeps what was read from them while they exist."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._known: dict[str, Run] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The runs that exist now."""
        if self.place.single is not None:
            found = [self.place.single] if (self.place.root / self.place.single / CONFIG).is_file() else []
        else:
            try:
                with os.scandir(self.place.root) as entries:
                    folders = [each.name for each in entries if _is_folder(each)]
            except OSError:
                folders = []
            found = sorted(name for name in folders if (self.place.root / name / CONFIG).is_file())
        with self._lock:
            for gone in self._known.keys() - set(found):
                self._known.pop(gone).close()
        return found

    def all(self) -> list[Run]:
        return [self._run(name) for name in self.names()]

    def get(self, name: str) -> Run:
        """Raise ``Refused`` for a name that is not in the listing."""
        if name not in self.names():
            raise unknown_run(name)
        return self._run(name)

    def _run(self, name: str) -> Run:
        with self._lock:
            if name not in self._known:
                self._known[name] = Run(self.place.root / name)
            return self._known[name]

    def close(self) -> None:
        with self._lock:
            for run in self._known.values():
                run.close()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return not entry.name.startswith(".") and entry.is_dir()
    except OSError:
        return False
