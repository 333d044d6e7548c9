"""The run directories in a folder. A run is addressed by its name in the listing, never by a path."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headwater.config.schema import Config
from headwater.core.errors import HeadwaterError
from headwater.dashboard.errors import unknown_run
from headwater.dashboard.record_log import RecordLog
from headwater.dashboard.rollout_files import SOURCES, RolloutFiles, Source
from headwater.dashboard.rollout_index import RolloutIndex
from headwater.dashboard.vocabulary import Vocabulary
from headwater.observe.evidence import recorded_config
from headwater.observe.run_directory import RunDirectory
from headwater.observe.status_file import RunStatus, read_status

CONFIG = "config.yaml"
_LOOK_S = 0.9


class Run:
    """One run directory, with what was read from it."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.path = path
        self.directory = RunDirectory(path)
        self.records = RecordLog(self.directory.metrics_file)
        self.rollouts: dict[Source, RolloutFiles] = {
            source: RolloutFiles(path, source, partial(self.records.known_resumes, source)) for source in SOURCES
        }
        self.index: dict[Source, RolloutIndex] = {
            source: RolloutIndex(files) for source, files in self.rollouts.items()
        }
        self.vocabulary = Vocabulary(self.directory.tokens_file)

    def check(self) -> None:
        """Raise ``Refused`` if the run no longer exists."""
        if not (self.path / CONFIG).is_file():
            raise unknown_run(self.name)

    def status(self, problems: list[str] | None = None) -> RunStatus | None:
        """None if there is none, or it cannot be read, which ``problems`` gets."""
        try:
            return read_status(self.directory.status_file)
        except HeadwaterError as error:
            if problems is not None:
                problems.append(f"{error}.")
            return None

    def config(self) -> Config | None:
        """None if this version cannot read it."""
        try:
            file = self.directory.config_file
            found = file.stat()
            return recorded_config(file, found.st_mtime_ns, found.st_size).config
        except (HeadwaterError, OSError, ValueError):
            return None

    def trace_files(self) -> list[Path]:
        """``trace.json`` and those of later parts of the run, oldest first."""
        numbered = {each: each.stem.removeprefix("trace-") for each in self.path.glob("trace-*.json")}
        later = sorted((int(number), each) for each, number in numbered.items() if number.isdecimal())
        return [each for each in (self.path / "trace.json", *(each for _, each in later)) if each.is_file()]

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
            "trace": tuple(_stamp(path) for path in self.trace_files()),
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
        self._looking = threading.Lock()
        self._looked: tuple[float, dict[str, dict[str, object]]] | None = None

    def names(self) -> list[str]:
        """The runs that exist now."""
        if self.place.single is not None:
            found = [self.place.single] if self._is_run(self.place.single) else []
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
        """Raise ``Refused`` for a name that is not in the listing. The other runs are not looked at."""
        if not self._is_run(name):
            with self._lock:
                if (gone := self._known.pop(name, None)) is not None:
                    gone.close()
            raise unknown_run(name)
        return self._run(name)

    def _is_run(self, name: str) -> bool:
        if self.place.single is not None and name != self.place.single:
            return False
        is_name = name == Path(name).name and "\0" not in name  # never a way to another folder
        is_shown = not name.startswith(".") or name == self.place.single
        try:
            return is_name and is_shown and (self.place.root / name / CONFIG).is_file()
        except (OSError, ValueError):
            return False

    def stamps(self) -> dict[str, dict[str, object]]:
        """``Run.parts`` of every run. All open pages share one look per second."""
        with self._looking:
            if self._looked is None or time.monotonic() - self._looked[0] > _LOOK_S:
                self._looked = time.monotonic(), {run.name: run.parts() for run in self.all()}
            return self._looked[1]

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
