"""The Parquet files of a run's rollouts: which there are, and single columns and rows of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.dashboard.errors import Refused, bad_request, not_found, unreadable
from headwater.dashboard.plain_values import numbers_of
from headwater.dashboard.record_log import Resumes

T = TypeVar("T")
Values = dict[str, Any]
"""The values of one row by their columns: lists as arrays, other values as they are."""
Source = Literal["train", "eval"]
SOURCES: tuple[Source, ...] = get_args(Source)
FOLDERS: dict[Source, str] = {"train": "rollouts", "eval": "eval"}
_NAME = re.compile(r"step_(\d{1,12})(?:_part_(\d{1,9}))?(?:-(\d{1,9}))?\.parquet")
_ID = re.compile(r"(eval\.)?(step_[0-9a-z_-]{1,60}):(\d{1,9})")
_FEW_ROWS = 32
"""Rows that are decoded together when one of a large row group is wanted."""
_FEW_BYTES = 1 << 20
"""Fewer of them, if they have more bytes than this."""

FACTS = np.dtype(
    [
        ("file", "i4"), ("row", "i4"), ("uid", "i4"), ("reward", "f8"), ("length", "i4"), ("prompt_length", "i4"),
        ("gap", "f4"), ("sample", "i2"), ("turns", "i2"), ("tool_calls", "i2"), ("failures", "i2"),
        ("stop_reason", "i2"), ("data_source", "i2"), ("ended_by", "i2"),
    ]
)  # fmt: skip
"""What is kept of every rollout, to sort and filter by. Texts are numbers of a ``Names``."""
_NUMBERS = {
    "sample": "sample", "reward": "reward", "response_length": "length", "prompt_length": "prompt_length",
    "num_turns": "turns", "num_tool_calls": "tool_calls", "num_failed_calls": "failures", "logprob_gap": "gap",
}  # fmt: skip
_TEXTS = {"uid": "uid", "stop_reason": "stop_reason", "data_source": "data_source", "ended_by": "ended_by"}
_MANY_NAMES = 30_000
"""More different stop reasons or data sources than this do not fit into ``FACTS``. They are shown, but not listed."""


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """One file: the rollouts of a step, or a part of an evaluation."""

    key: str
    """The beginning of the ids of its rollouts, such as ``eval.step_000003``."""
    step: int
    part: int
    number: int
    """1, or which of the files of this step it is, if the step was computed more than once."""
    path: Path

    def id_of(self, row: int) -> str:
        return f"{self.key}:{row}"


class Names:
    """Numbers for texts that repeat. -1 stands for no text."""

    def __init__(self, most: int | None = None) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._most = most

    def number(self, text: str | None) -> int:
        if text is None:
            return -1
        found = self._numbers.get(text)
        if found is None:
            if self._most is not None and len(self.texts) >= self._most:
                return -1
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return found

    def find(self, text: str) -> int | None:
        return self._numbers.get(text)


class AllNames:
    """The names of one source of rollouts, by the field of ``FACTS``."""

    def __init__(self) -> None:
        self.of = {field: Names(None if field == "uid" else _MANY_NAMES) for field in _TEXTS.values()}


class RolloutFiles:
    """The files of one source. Of files of the same step, only the newest one counts: the step was computed again."""

    def __init__(self, run: Path, source: Source, resumes: Callable[[], Resumes] = Resumes) -> None:
        """``resumes`` returns what the run's metrics say about resumes now."""
        self.source = source
        self.folder = run / FOLDERS[source]
        self._resumes = resumes
        self._lock = threading.Lock()
        self._stamp: tuple[object, ...] = ()
        self._files: list[RolloutFile] = []
        self._by_key: dict[str, RolloutFile] = {}
        self._by_step: dict[int, list[RolloutFile]] = {}

    def exists(self) -> bool:
        return any(self.folder.glob("step_*.parquet"))

    def count(self) -> int:
        return len(self.files())

    def files(self) -> list[RolloutFile]:
        """Oldest step first."""
        with self._lock:
            self._look()
            return self._files

    def of_step(self, step: int) -> list[RolloutFile]:
        with self._lock:
            self._look()
            found = self._by_step.get(step, [])
        if not found:
            kind = "evaluation" if self.source == "eval" else "step"
            raise not_found(f"There are no saved rollouts of {kind} {step}.")
        return found

    def steps(self) -> list[int]:
        with self._lock:
            self._look()
            return list(self._by_step)

    def file(self, key: str) -> RolloutFile:
        with self._lock:
            self._look()
            found = self._by_key.get(key)
        if found is None:
            raise not_found(f"There is no rollout file {key!r} in this run.")
        return found

    def _look(self) -> None:
        try:
            stamp = (self.folder.stat().st_mtime_ns, resumes := self._resumes())
        except OSError:
            self._stamp, self._files, self._by_key, self._by_step = (), [], {}, {}
            return
        if stamp == self._stamp:
            return
        newest: dict[tuple[int, int], RolloutFile] = {}
        by_key = {}
        for path in self.folder.iterdir():
            if (match := _NAME.fullmatch(path.name)) is None:
                continue
            step, part, number = int(match[1]), int(match[2] or 1), int(match[3] or 1)
            prefix = "eval." if self.source == "eval" else ""
            file = by_key[f"{prefix}{path.stem}"] = RolloutFile(f"{prefix}{path.stem}", step, part, number, path)
            if number >= newest.get((step, part), file).number:
                newest[step, part] = file
        files = [file for _, file in sorted(newest.items())]
        if resumes.times:
            files = [file for file in files if not _is_superseded(file, resumes)]
        self._stamp, self._files, self._by_key = stamp, files, by_key
        self._by_step = {}
        for file in files:
            self._by_step.setdefault(file.step, []).append(file)


def _is_superseded(file: RolloutFile, resumes: Resumes) -> bool:
    """Whether the run was resumed from an earlier step after the file was written.

    Each time that a step was computed, it got a record and a file. If its records are invalid, so are as many files,
    also in a copy whose files have other times. The time tells it of a file whose record was never written.
    """
    if file.number <= resumes.gone.get(file.step, 0):
        return True
    try:
        written = file.path.stat().st_mtime
    except OSError:
        return False
    return any(file.step > step and written < at for step, at in resumes.times)


def parse_id(text: str) -> tuple[Source, str, int]:
    """The source, the key of the file and the row of a rollout's id."""
    match = _ID.fullmatch(text)
    if match is None:
        raise bad_request(f"id = {text[:80]!r}: is not the id of a rollout; ids look like step_000003:17.")
    return ("eval" if match[1] else "train"), f"{match[1] or ''}{match[2]}", int(match[3])


class OpenFile:
    """A Parquet file. All problems with it are ``Refused`` with its name."""

    def __init__(self, file: RolloutFile) -> None:
        self.file = file
        self._parquet: Any = self._guarded(lambda: pq.ParquetFile(file.path))
        self.columns = frozenset(self._parquet.schema_arrow.names)
        self.num_rows: int = self._parquet.metadata.num_rows

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.close()

    def read(self, columns: Iterable[str]) -> pa.Table:
        """Whole columns; those that the file does not have are left out."""
        wanted = [name for name in columns if name in self.columns]
        return self._guarded(lambda: self._parquet.read(columns=wanted, use_threads=False))

    def is_large(self, row: int, least: int = _FEW_BYTES) -> bool:
        """Whether a row has too many tokens to have all its columns in memory at once."""
        begin, metadata = 0, self._parquet.metadata
        for group in range(metadata.num_row_groups):
            if begin <= row < begin + metadata.row_group(group).num_rows:
                return self._bytes_per_row(group) > least
            begin += metadata.row_group(group).num_rows
        return False

    def _bytes_per_row(self, group: int) -> float:
        """How large the rows of a row group are in memory, on average and about: eight bytes for each value, and the
        texts. Equal values need nearly no bytes in the file."""
        found = self._parquet.metadata.row_group(group)
        num_values = sum(found.column(place).num_values for place in range(found.num_columns))
        return int(found.total_byte_size + 8 * num_values) / max(1, int(found.num_rows))

    def row(self, row: int, columns: Iterable[str]) -> Values:
        (found,) = self.rows([row], columns, lambda _, values: values)
        return found

    def rows(self, rows: Sequence[int], columns: Iterable[str], make: Callable[[int, Values], T]) -> list[T]:
        """What ``make`` makes of some rows, in the order in which they are asked for. Only their row groups are read,
        and only a few rows are in memory at a time: one with a million tokens takes 50 MB."""
        for row in rows:
            if not 0 <= row < self.num_rows:
                name = self.file.path.name
                raise not_found(f"{name} has {self.num_rows} rollouts; there is no number {row} in it.")
        wanted = [name for name in columns if name in self.columns]
        found: dict[int, T] = {}
        if wanted and rows:
            read = ((row, make(row, values)) for row, values in self._wanted_rows(set(rows), wanted))
            self._guarded(lambda: found.update(read))
            if self.is_large(rows[0]):
                pa.default_memory_pool().release_unused()
        return [found[row] if row in found else make(row, {}) for row in rows]

    def _wanted_rows(self, rows: set[int], columns: list[str]) -> Iterator[tuple[int, Values]]:
        begin = 0
        metadata = self._parquet.metadata
        for group in range(metadata.num_row_groups):
            end = begin + metadata.row_group(group).num_rows
            left = {row for row in rows if begin <= row < end}
            place = begin
            if left:
                at_once = int(min(_FEW_ROWS, max(1, _FEW_BYTES // max(1, self._bytes_per_row(group)))))
                for batch in self._parquet.iter_batches(
                    at_once, row_groups=[group], columns=columns, use_threads=False
                ):
                    for row in sorted(row for row in left if place <= row < place + batch.num_rows):
                        yield row, {name: _value(batch.column(name), row - place) for name in columns}
                        left.discard(row)
                    place += batch.num_rows
                    if not left:
                        break
            begin = end

    def facts(self, number: int, names: AllNames) -> NDArray[np.void]:
        """``FACTS`` of every row. ``number`` stands for the file."""
        light = [*_NUMBERS, *_TEXTS]
        if "response_length" not in self.columns:  # a file of an earlier version
            light.append("tokens")
        table = self.read(light)
        facts = np.zeros(self.num_rows, FACTS)
        facts["file"], facts["row"] = number, np.arange(self.num_rows)
        facts["gap"] = facts["reward"] = np.nan
        for name, field in _NUMBERS.items():
            if name in table.column_names:
                facts[field] = _numbers(table[name], FACTS[field])
        if "tokens" in table.column_names:
            lengths = numbers_of(pc.list_value_length(table["tokens"]))
            facts["length"] = np.maximum(0, np.nan_to_num(lengths).astype(np.int64) - facts["prompt_length"])
        for name, field in _TEXTS.items():
            facts[field] = -1
            if name in table.column_names:
                facts[field] = _codes(table[name], names.of[field])
        return facts

    def matching(self, text: str) -> NDArray[np.bool_]:
        """Which rows have ``text`` in their prompt, response or uid. Upper and lower case are the same."""
        found = np.zeros(self.num_rows, bool)
        table = self.read(("prompt", "response", "uid"))
        for column in table.columns:
            found |= self._guarded(partial(_contains, column, text))
        return found

    def _guarded(self, work: Callable[[], Any]) -> Any:
        name = self.file.path.name
        try:
            return work()
        except FileNotFoundError as error:
            raise not_found(f"{name} no longer exists.") from error
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise unreadable(
                f"{name} cannot be read: it is damaged, or is not a Parquet file of rollouts ({reason})."
            ) from error


def _contains(column: Any, text: str) -> Any:
    hits = pc.match_substring(column, text, ignore_case=True)
    return np.nan_to_num(numbers_of(hits)).astype(bool)


def _value(column: Any, place: int) -> Any:
    scalar = column[place]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return numbers_of(scalar.values) if scalar.is_valid else np.zeros(0)
    return scalar.as_py()


def _numbers(column: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return np.full(len(column), np.nan if dtype.kind == "f" else 0, dtype)
    values: NDArray[np.float64] = numbers_of(column).astype(np.float64)
    if dtype.kind == "f":
        return values.astype(dtype)
    limit = np.iinfo(dtype).max
    limited: NDArray[Any] = np.clip(np.nan_to_num(values), -limit, limit).astype(dtype)
    return limited


def _codes(column: Any, names: Names) -> NDArray[np.int64]:
    """Each different text is looked up once."""
    joined = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not (pa.types.is_string(joined.type) or pa.types.is_large_string(joined.type)):
        return np.full(len(column), -1)
    encoded = joined.dictionary_encode()
    of_each = np.array([*(names.number(text) for text in encoded.dictionary.to_pylist()), -1])
    places = np.nan_to_num(numbers_of(encoded.indices), nan=-1).astype(np.int64)
    codes: NDArray[np.int64] = of_each[places]
    return codes


def try_open(file: RolloutFile, problems: list[str]) -> OpenFile | None:
    """None if the file cannot be read, which ``problems`` gets."""
    try:
        return OpenFile(file)
    except Refused as refused:
        problems.append(refused.message)
        return None
