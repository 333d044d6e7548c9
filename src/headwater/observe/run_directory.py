"""The directory of one run. A run never overwrites what an earlier part of it wrote."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from headwater.core.disk import disk_full
from headwater.core.errors import RunError
from headwater.core.registry import similar_path

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 16
_NUM_PARSED = 256
"""How many of the lines that were read last are kept as records."""
_KINDS = ("train", "eval", "warm_start", "step", "resume")
"""Of the records in ``metrics.jsonl`` and ``ledger.jsonl``."""


@dataclass(frozen=True)
class MetricsRecord:
    """One line of ``metrics.jsonl``."""

    kind: Literal["train", "eval", "warm_start", "resume"]
    """``resume`` means that records after ``step`` are no longer valid."""
    step: int
    """Training steps done; -1 for a resume that begins again."""
    time: float
    """Seconds since the epoch."""
    values: Mapping[str, float]
    """The metrics by name, such as ``reward/mean``."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "step": self.step, "time": self.time, **self.values}


class RunDirectory:
    """``runs/<name>/``: config.yaml, run_id, metrics.jsonl, ledger.jsonl, status.json, writer.lock, reward.png,
    tokens.parquet, the folders rollouts, eval, media and checkpoints, trace.json if ``trainer.trace`` is set, and
    servers.sock and servers.jsonl if the run has several servers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: set[Path] = set()
        """Files whose skipped lines were reported."""

    @classmethod
    def create(cls, root: Path, name: str) -> RunDirectory:
        """Create a new directory: ``name``, or ``name-2``, ``name-3``, ... if that exists."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                path = root / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir()
                    run = cls(path)
                    with run.removed_if_unused():
                        write_whole(run.id_file, os.urandom(16).hex())
                    return run
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise RunError(f"run.root = {root}: cannot create {name!r} there: {error.strerror or error}") from error

    @contextmanager
    def removed_if_unused(self) -> Iterator[None]:
        """Remove the directory if the block fails before it has recorded anything: there is nothing to resume.

        The error gets a note that says so.
        """
        try:
            yield
        except Exception as error:
            if not self.metrics_file.exists():
                shutil.rmtree(self.path, ignore_errors=True)
                if not self.path.exists():
                    error.add_note(f"{self.path} was removed, because the run has recorded nothing")
            raise

    def check_unstarted(self) -> None:
        """Refuse a folder that is not what a run left that was killed before it wrote its config."""
        if not self.id_file.is_file() or self.metrics_file.exists() or self.checkpoint_steps():
            raise RunError(
                f"{self.path}: exists and is not a run directory (config.yaml is missing); move it away, or set "
                "another run.name"
            )

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        if not (path / "config.yaml").is_file():
            raise RunError(f"{path}: not a run directory (config.yaml is missing); {which_run(path)}")
        return cls(path)

    @property
    def id_file(self) -> Path:
        """Random text that distinguishes the run from others of the same name. Copies of the run have it too."""
        return self.path / "run_id"

    @property
    def config_files(self) -> list[Path]:
        """``config.yaml``, and the files that later resumes with other settings added, oldest first."""
        numbers = {path: path.stem.removeprefix("config-") for path in self.path.glob("config-*.yaml")}
        later = sorted((int(number), path) for path, number in numbers.items() if number.isdecimal())
        return [self.path / "config.yaml", *(path for _, path in later)]

    @property
    def config_file(self) -> Path:
        """The current settings of the run."""
        return self.config_files[-1]

    def write_config(self, text: str) -> None:
        """Store ``text`` as the run's settings. Files with earlier settings are kept."""
        if not self.config_file.exists() or self.config_file.read_text(encoding="utf-8") != text:
            write_whole(self.free_file(".", "config", ".yaml"), text)

    @property
    def reference(self) -> Path:
        """The reference policy, if the run began with a supervised warm start."""
        return self.path / "reference"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger_file(self) -> Path:
        """The outcome of every dispatched prompt, one line per step."""
        return self.path / "ledger.jsonl"

    @property
    def status_file(self) -> Path:
        """The state of the run at this moment, or when it ended."""
        return self.path / "status.json"

    @property
    def lock_file(self) -> Path:
        """Held by the process that writes this directory (``observe/run_lock.py``)."""
        return self.path / "writer.lock"

    @property
    def servers_socket(self) -> Path:
        """Where ``headwater servers`` reaches a run that has several servers (``observe/run_socket.py``)."""
        return self.path / "servers.sock"

    @property
    def servers_file(self) -> Path:
        """How the servers were changed while the run ran (``observe/server_changes.py``)."""
        return self.path / "servers.jsonl"

    def free_trace_file(self) -> Path:
        """``trace.json``, or a numbered name if an earlier part of the run has written one."""
        return self.free_file(".", "trace", ".json")

    @property
    def tokens_file(self) -> Path:
        """The bytes of every token of the vocabulary, so that rollouts can be shown without the model's tokenizer."""
        return self.path / "tokens.parquet"

    @property
    def media(self) -> Path:
        """Images and videos of rollouts, each once (``observe/media_store.py``)."""
        return self.path / "media"

    @property
    def curve_file(self) -> Path:
        return self.path / "reward.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first. Whether its files are whole is not checked."""
        return saved_steps(self.checkpoints)

    def foreign_checkpoints(self) -> list[Path]:
        """Entries of ``checkpoints/`` that look like a checkpoint but are none, such as ``step_000002_copy``."""
        known = {self.checkpoint(step) for step in self.checkpoint_steps()}
        return sorted(path for path in self.checkpoints.glob("step_*") if path not in known)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def model(self, step: int) -> Path:
        """The model after ``step``, in Hugging Face format, inside its checkpoint."""
        return self.checkpoint(step) / "model"

    def free_file(self, folder: str, stem: str, suffix: str) -> Path:
        """A path in ``folder`` that does not exist yet. A second file with the same stem gets a number."""
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

    def append_server_change(self, record: Mapping[str, Any]) -> None:
        _append(self.servers_file, record)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The valid records of the run. Records after the step from which the run was resumed are left out."""
        return self._all_records(self.metrics_file)

    def read_ledger(self) -> list[dict[str, Any]]:
        """Like ``read_metrics``: one record per step, with the dispatches that ended in it."""
        return self._all_records(self.ledger_file)

    def last_metrics(self, count: int) -> list[dict[str, Any]]:
        """Like ``read_metrics``, but only for the last ``count`` lines. The rest of the file is not read."""
        return _valid(last_records(self.metrics_file, count).records)

    def last_ledger(self, count: int) -> list[dict[str, Any]]:
        """Like ``read_ledger``, but only for the last ``count`` lines."""
        return _valid(last_records(self.ledger_file, count).records)

    def _all_records(self, path: Path) -> list[dict[str, Any]]:
        read = last_records(path, None)
        if read.skipped and path not in self._told:
            self._told.add(path)
            logger.warning("%s: %s", path, read.describe_skipped())
        return _valid(read.records)


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps of the folders ``step_000001`` and so on, oldest first. Other names are ignored."""
    names = (path.name for path in checkpoints.glob("step_*") if path.is_dir())
    return sorted(int(name.removeprefix("step_")) for name in names if is_checkpoint_name(name))


def is_checkpoint_name(name: str) -> bool:
    number = name.removeprefix("step_")
    return name.startswith("step_") and number.isdecimal() and number == f"{int(number):06d}"


def set_aside(path: Path) -> None:
    """Rename a folder whose name another one gets."""
    number = 1
    while (aside := path.with_name(f"superseded-{number}_{path.name}")).exists():
        number += 1
    path.rename(aside)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line and write it immediately, so that a killed run loses no history."""
    line = json.dumps(record) + "\n"
    try:
        with path.open("a+b") as file:
            # A process that was killed while writing leaves an incomplete line; the next record starts a new line.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
    except OSError as error:
        if (full := disk_full(error, path, "a record", needed_bytes=len(line))) is not None:
            raise full from error
        raise


@dataclass(frozen=True)
class ReadRecords:
    """The records of a JSON-lines file, oldest first."""

    records: list[dict[str, Any]]
    skipped: list[int]
    """The lines that are no records, counted from the first line that was read."""

    def describe_skipped(self) -> str:
        shown = ", ".join(map(str, self.skipped[:5])) + (", ..." if len(self.skipped) > 5 else "")
        lines = "line" if len(self.skipped) == 1 else "lines"
        return f"skipped {lines} {shown}: incomplete, changed or foreign, and no record of a run"


def _valid(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        if record["kind"] == "resume":
            latest = {key: each for key, each in latest.items() if each["step"] <= record["step"]}
        else:
            latest[record["kind"], record["step"]] = record
    return list(latest.values())


def last_records(path: Path, count: int | None) -> ReadRecords:
    """The last ``count`` records of a JSON-lines file, or all of them; none if there is no file.

    Only the end of the file is read. Lines that are no records are skipped: a process was killed while writing one or
    is writing it now, bytes were changed, or something else has written into the file.
    """
    if (count is not None and count < 1) or not path.exists():
        return ReadRecords([], [])
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END) if count is not None else 0
        read = file.read() if count is None else b""
        while start > 0 and count is not None and read.count(b"\n") <= count:
            length = min(_BLOCK_BYTES, start)
            start = file.seek(start - length)
            read = file.read(length) + read
    lines = read.splitlines()
    if start > 0:
        lines = lines[1:]  # the first line is incomplete
    # The doctor and the dashboard look at the end of a live run again and again, and most of its lines are the same.
    parse = _parse if count is None else _parse_again
    parsed = [(number, parse(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    kept = [(number, record) for number, record in parsed if record is not None][-(count or 0) :]
    first = kept[0][0] if kept and count is not None else 0
    return ReadRecords(
        [record for _, record in kept], [number for number, each in parsed if each is None and number > first]
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") not in _KINDS or type(record.get("step")) is not int:
        return None
    return record


def _parse_again(line: bytes) -> dict[str, Any] | None:
    record = _parse_once(line)
    return None if record is None else dict(record)


_parse_once = lru_cache(maxsize=_NUM_PARSED)(_parse)


def which_run(path: Path) -> str:
    """What to give instead of ``path``, which is not a run directory."""
    try:
        runs = [file.parent for file in path.glob("*/config.yaml")]
    except OSError:
        runs = []
    if runs:
        newest = max(runs, key=lambda run: run.stat().st_mtime)
        return f"it is a folder of runs; give one of them, for example {newest}"
    around = [parent for parent in path.parents if (parent / "config.yaml").is_file()]
    if around:
        return f"it is a part of a run; give {around[0]}"
    return f"give a directory that `headwater train` created, for example runs/quickstart{similar_path(path)}"


def write_whole(path: Path, text: str) -> None:
    """Write a temporary file and rename it to ``path``, so that a reader never sees an incomplete file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if (full := disk_full(error, path, "the file", needed_bytes=len(text))) is not None:
            raise full from error
        raise
