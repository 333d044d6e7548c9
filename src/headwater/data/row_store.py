"""Row stores: rows by number, whatever they are kept in, and the place of each row for error messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headwater.core.errors import DataError


class SupportsRows(Protocol):
    """What ``datasets.Dataset`` and a list of dicts have in common."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Rows(Protocol):
    """Rows of one source."""

    @property
    def name(self) -> str:
        """Short name of the source: the default ``data_source``, and the first part of the uids."""

    @property
    def folder(self) -> Path | None:
        """Where relative paths of images and videos start, if the source is a file."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...
    def place(self, index: int) -> str:
        """Where a person finds the row, for example ``data/train.jsonl, line 3``."""


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A row and all that is known about where it stands; it travels to worker processes."""

    row: Mapping[str, Any]
    place: str
    uid: str
    source_name: str
    folder: Path | None


class ParquetRows:
    """Kept as Arrow columns; a row becomes Python values only when it is asked for."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        check_file(path)
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable parquet file ({_first_line(error)}); write it again") from error
        self._path = path
        self.name = path.stem
        self.folder: Path | None = path.parent
        check_not_empty(self, str(path))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def place(self, index: int) -> str:
        return f"{self._path}, row {index}"


class JsonlRows:
    """One JSON object per line, kept as text: rows may differ in their keys, and none is changed to fit the others."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        check_file(path)
        numbered = enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        self._lines = [(number, line) for number, line in numbered if line.strip()]
        self._path = path
        self.name = name or path.stem
        self.folder: Path | None = path.parent
        check_not_empty(self, str(path))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        try:
            row = json.loads(self._lines[index][1])
        except ValueError as error:  # bad JSON or bad UTF-8
            raise DataError(f"{self.place(index)}: not JSON ({error}); write one JSON object per line") from error
        return check_object(row, self.place(index))

    def place(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index][0]}"


class JsonRows:
    """One JSON array of objects."""

    def __init__(self, path: Path) -> None:
        check_file(path)
        try:
            rows = json.loads(path.read_bytes())
        except ValueError as error:
            hint = "write one array of objects; a file with one object per line is named .jsonl"
            raise DataError(f"{path}: not JSON ({error}); {hint}") from error
        if not isinstance(rows, list):
            raise DataError(f"{path}: holds {_kind(rows)}; must be an array of objects: [{{...}}, ...]")
        self._rows = rows
        self._path = path
        self.name = path.stem
        self.folder: Path | None = path.parent
        check_not_empty(self, str(path))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return check_object(self._rows[index], self.place(index))

    def place(self, index: int) -> str:
        return f"{self._path}, row {index}"


class ListRows:
    """Rows that a task made, or any object with ``len`` and rows by number, such as a ``datasets.Dataset``."""

    def __init__(self, rows: SupportsRows | Sequence[Any], name: str, label: str) -> None:
        self._rows = rows
        self._label = label
        self.name = name
        self.folder: Path | None = None
        check_not_empty(self, label)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return check_object(self._rows[index], self.place(index))

    def place(self, index: int) -> str:
        return f"{self._label}, row {index}"


def check_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name the files in it, for example {str(path / '*.parquet')!r}")
    if not path.is_file():
        raise DataError(f"{path}: no such file (looked in {Path.cwd()}); check data.train and data.eval")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; write it again or leave it out")


def check_not_empty(rows: Rows, label: str) -> None:
    if len(rows) == 0:
        raise DataError(f"{label}: has no rows; add rows or leave it out of data.train and data.eval")


def check_object(row: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: is {_kind(row)}; must be an object such as {{'prompt': ...}}")
    return row


def _kind(value: Any) -> str:
    name = type(value).__name__
    return {"dict": "an object", "list": "an array", "str": "a string"}.get(name, f"a {name}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
