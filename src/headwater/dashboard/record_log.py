"""``metrics.jsonl`` as columns, read once and then only where it has grown."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.json
from numpy.typing import NDArray

from headwater.dashboard.plain_values import number, numbers_of

KINDS = ("train", "eval", "warm_start")
_HEAD = ("kind", "step", "time")
_BLOCK_BYTES = 1 << 20
_FEW_BYTES, _MANY_BYTES = 1 << 19, 8 << 20
"""From how many bytes on lines are parsed together, and how many at a time if a file is long."""
_FULL_CHUNK = 512
"""Rows that are collected as Python lists before they become an array."""
_MAX_LINE_BYTES = 8 << 20
"""A longer line is no record, and is not kept in memory."""

Floats = NDArray[np.float64]


@dataclass
class _Chunk:
    """Rows with the same keys. Nearly all steps of a run have the same ones."""

    keys: tuple[str, ...]
    steps: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    array: Floats | None = None
    """The rows, once they are many or someone reads them."""
    columns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns = {key: place for place, key in enumerate(self.keys)}

    def values(self) -> Floats:
        if self.rows:
            new = np.array(self.rows, dtype=np.float64).reshape(len(self.rows), len(self.keys))
            self.array = new if self.array is None else np.concatenate([self.array, new])
            self.rows = []
        return self.array if self.array is not None else np.zeros((0, len(self.keys)))

    def keep(self, is_kept: NDArray[np.bool_]) -> None:
        self.array = self.values()[is_kept]
        self.steps = [step for step, kept in zip(self.steps, is_kept.tolist(), strict=True) if kept]


class Table:
    """The records of one kind, in order of their steps."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._last = -math.inf
        self.num_dropped: Counter[int] = Counter()
        """By step: how many of its records a resume made invalid."""

    def add(self, step: int, keys: tuple[str, ...], values: list[float]) -> None:
        """``time`` is the first key."""
        if step <= self._last:
            self._drop(lambda steps: steps != step)
        chunk = self._chunks[-1] if self._chunks else None
        if chunk is None or chunk.keys != keys or step < chunk.steps[-1] or len(chunk.steps) >= _FULL_CHUNK:
            if chunk is not None:
                chunk.values()
            chunk = _Chunk(keys)
            self._chunks.append(chunk)
        chunk.steps.append(step)
        chunk.rows.append(values)
        self._last = max(self._last, step)

    def add_many(self, steps: NDArray[np.int64], keys: tuple[str, ...], values: Floats) -> None:
        """Like ``add``, for steps that follow each other and all earlier ones."""
        self._chunks.append(_Chunk(keys, steps.tolist(), array=values))
        self._last = int(steps[-1])

    def follows(self, steps: NDArray[np.int64]) -> bool:
        """Whether ``add_many`` takes them."""
        return bool(steps[0] > self._last and (np.diff(steps) > 0).all())

    def drop_after(self, step: int) -> None:
        """A resume: what was recorded after ``step`` is no longer valid."""
        later = self._all_steps()
        self.num_dropped.update(later[later > step].tolist())
        self._drop(lambda steps: steps <= step)
        self._last = max((each for chunk in self._chunks for each in chunk.steps), default=-math.inf)

    def _drop(self, is_kept: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> None:
        for chunk in self._chunks:
            kept = is_kept(np.array(chunk.steps, dtype=np.int64))
            if not kept.all():
                chunk.keep(kept)
        self._chunks = [chunk for chunk in self._chunks if chunk.steps]

    def __len__(self) -> int:
        return sum(len(chunk.steps) for chunk in self._chunks)

    def steps(self) -> NDArray[np.int64]:
        return np.sort(self._all_steps())

    def _all_steps(self) -> NDArray[np.int64]:
        parts = [np.array(chunk.steps, dtype=np.int64) for chunk in self._chunks]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def column(self, key: str) -> Floats:
        """The values of ``key`` in the order of ``steps()``; NaN where a record has none."""
        parts = []
        for chunk in self._chunks:
            place, values = chunk.columns.get(key), chunk.values()
            parts.append(values[:, place] if place is not None else np.full(len(values), np.nan))
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return joined[np.argsort(self._all_steps(), kind="stable")]

    def names(self) -> Iterator[str]:
        """Every key, without ``time``, in the order of the records."""
        return (key for key in dict.fromkeys(key for chunk in self._chunks for key in chunk.keys) if key != "time")

    def counts(self) -> dict[str, int]:
        """In how many records each key has a finite number."""
        found: dict[str, int] = {}
        for chunk in self._chunks:
            finite = np.isfinite(chunk.values()).sum(axis=0).tolist()
            for key, count in zip(chunk.keys, finite, strict=True):
                found[key] = found.get(key, 0) + count
        return found

    def last(self, key: str) -> float | None:
        """The newest finite value."""
        for chunk in sorted(self._chunks, key=lambda each: -each.steps[-1]):
            if (place := chunk.columns.get(key)) is not None:
                values = chunk.values()[:, place]
                finite = values[np.isfinite(values)]
                if len(finite):
                    return float(finite[-1])
        return None


@dataclass(frozen=True)
class Resumes:
    """What resumes made invalid."""

    times: tuple[tuple[int, float], ...] = ()
    """The step from which each resume continued, and when."""
    gone: Mapping[int, int] = field(default_factory=dict)
    """Steps that were recorded this many times, and have no valid record now."""


@dataclass(frozen=True)
class _Place:
    """Up to where a file has been read. Another file of the same name is read from its beginning."""

    inode: int = -1
    offset: int = 0
    first: bytes = b""


class RecordLog:
    """Reads a run's metrics. ``refresh`` reads what was added; every caller holds ``lock`` while it uses ``tables``."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.tables: Mapping[str, Table] = {}
        self.num_skipped = 0
        """Lines that are no records."""
        self.resumes: list[tuple[int, float]] = []
        """The step from which each resume continued, and when."""
        self._path = path
        self._reset(_Place())

    def _reset(self, place: _Place) -> None:
        self.tables = {kind: Table() for kind in KINDS}
        self.num_skipped, self.resumes = 0, []
        self._place = place
        self._keys: dict[tuple[str, ...], tuple[str, ...]] = {}

    def known_resumes(self, kind: str) -> Resumes:
        """As the file is now. Unlike other methods, this one takes the lock."""
        with self.lock:
            self.refresh()
            if not self.resumes:
                return Resumes()
            table = self.tables[kind]
            valid = set(table.steps().tolist())
            return Resumes(
                tuple(self.resumes), {step: num for step, num in table.num_dropped.items() if step not in valid}
            )

    def refresh(self) -> None:
        """Read the lines that were added. A last line without its end is read when it is complete."""
        try:
            with self._path.open("rb") as file:
                self._read(file)
        except FileNotFoundError:
            self._reset(_Place())

    def _read(self, file: BinaryIO) -> None:
        now, first = os.fstat(file.fileno()), file.read(64)
        place = self._place
        if now.st_ino != place.inode or now.st_size < place.offset or not first.startswith(place.first):
            self._reset(_Place(now.st_ino))
        offset, kept = self._place.offset, b""
        file.seek(offset)
        size = _MANY_BYTES if now.st_size - offset > _MANY_BYTES else _BLOCK_BYTES
        while block := file.read(size):
            block, whole = kept + block, block.rfind(b"\n") + 1 + len(kept) if b"\n" in block else 0
            if whole < _FEW_BYTES or not take_many(block[:whole], self.tables):
                for line in block[:whole].splitlines():
                    self._take(line)
            kept, offset = block[whole:], offset + whole
            if len(kept) > _MAX_LINE_BYTES:
                self.num_skipped, offset, kept = self.num_skipped + 1, offset + len(kept), b""
        self._place = _Place(now.st_ino, offset, first[:offset])

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            record = json.loads(line)
            kind, step, time = record["kind"], record["step"], record.get("time")
        except (ValueError, RecursionError, TypeError, KeyError):
            self.num_skipped += 1
            return
        if type(step) is not int or abs(step) > 2**53 or kind not in (*KINDS, "resume"):
            self.num_skipped += 1
            return
        if kind == "resume":
            self.resumes.append((step, number(time)))
            for table in self.tables.values():
                table.drop_after(step)
            return
        names = tuple(record)
        if names[:3] == _HEAD:
            values = list(record.values())[2:]
            keys = self._keys.setdefault(names, names[2:])
        else:
            rest = {key: value for key, value in record.items() if key not in _HEAD}
            values, keys = [time, *rest.values()], ("time", *rest)
        if not _are_numbers(values):
            values = [number(value) for value in values]
        self.tables[kind].add(step, keys, values)


def take_many(lines: bytes, tables: Mapping[str, Table]) -> bool:
    """Parse many lines with Arrow, which uses several cores. False if anything about them is unusual, and nothing is
    added: then they are parsed one by one."""
    options = pa.json.ReadOptions(use_threads=True, block_size=_BLOCK_BYTES)
    try:
        read = pa.json.read_json(pa.BufferReader(lines), read_options=options)
        if not {"kind", "step"} <= set(read.column_names) or not pa.types.is_int64(read["step"].type):
            return False
        columns = {
            name: numbers_of(read[name])
            for name in read.column_names
            if name not in ("kind", "step") and not pa.types.is_null(read[name].type)
        }
        steps = numbers_of(read["step"])
        kinds = np.array(read["kind"].to_pylist())
    except (pa.ArrowException, ValueError):
        return False
    if steps.dtype != np.int64 or not np.isin(kinds, KINDS).all():
        return False
    parts = [(kind, np.flatnonzero(kinds == kind)) for kind in KINDS]
    parts = [(kind, rows) for kind, rows in parts if len(rows)]
    if not all(tables[kind].follows(steps[rows]) for kind, rows in parts):
        return False
    columns.setdefault("time", np.full(len(steps), np.nan))
    for kind, rows in parts:
        of_kind = {name: values[rows].astype(np.float64) for name, values in columns.items()}
        known = [name for name, values in of_kind.items() if name != "time" and not np.isnan(values).all()]
        names = ("time", *known)
        tables[kind].add_many(steps[rows], names, np.stack([of_kind[name] for name in names], axis=1))
    return True


def _are_numbers(values: list[Any]) -> bool:
    """Whether NumPy makes one row of numbers of them. Looking at all of them together is faster than at each."""
    try:
        made = np.array(values)
    except (ValueError, OverflowError):  # lists of different lengths
        return False
    return made.ndim == 1 and made.dtype.kind in "fiub"
