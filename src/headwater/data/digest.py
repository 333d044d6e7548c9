"""Digests of rows, by which a resumed run notices that its data are others than those of its checkpoint."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import hashlib
import json
import pathlib
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError
from headwater.data.videos import evenly

MAX_ROWS = 10_000
"""Rows that are compared, at equal distances. Of a million rows in Parquet, they are made within a second."""
_MASK = 0xFFFFFFFF
_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, pathlib.PurePath)
REMEDY = (
    "the position in the data and unfinished rollouts belong to the rows of the checkpoint; resume with the data as "
    "they were, or start a new run from the checkpoint's model: headwater train RECIPE model.path=CHECKPOINT/model"
)
Digests = npt.NDArray[np.uint32]


def row_digest(row: Mapping[str, Any], media_columns: Collection[str] = ()) -> int:
    """A number that depends on all values of a row, not on the order of its columns. It is the same in every process.

    Images and videos that ``media_columns`` refer to count by the names of their files, which may be in another folder
    when a run is resumed. Files are not read. Objects of unknown types count by their type.
    """
    content = {**row, **{name: _without_folders(row[name]) for name in media_columns if name in row}}
    try:
        text = _ENCODER.encode(content)
    except TypeError:  # keys that JSON does not have, or that cannot be sorted
        text = _ENCODER.encode(_with_text_keys(content))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def digests_of(digest: Callable[[int], int], num_rows: int, num_compared: int = MAX_ROWS) -> Digests:
    """``digest`` of all rows, or of ``num_compared`` at equal distances."""
    return np.array([digest(index) & _MASK for index in evenly(num_rows, num_compared)], dtype="<u4")


def to_text(digests: Digests) -> str:
    return base64.b64encode(digests.tobytes()).decode()


def from_text(text: str) -> Digests:
    return np.frombuffer(base64.b64decode(text), dtype="<u4")


def check_same(before: Digests, now: Digests, num_rows: int, name_of: Callable[[int], str]) -> None:
    """Refuse rows that are not those of the checkpoint, whose digests are ``before``."""
    differ = np.flatnonzero(before != now)
    if not differ.size:
        return
    first = name_of(evenly(num_rows, len(now))[differ[0]])
    among = f"{num_rows:,} rows" if len(now) == num_rows else f"{len(now):,} rows that were compared"
    if np.array_equal(np.sort(before), np.sort(now)):
        what = f"the rows are those of the checkpoint in another order: {differ.size:,} of {among} moved"
    else:
        what = f"{differ.size:,} of {among} are not those of the checkpoint"
    raise DataError(f"data.train: {what}, the first is row {first}; {REMEDY}")


def _plain(value: Any) -> Any:
    """What JSON does not have, as what it has."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(_ENCODER.encode, value))
    if isinstance(value, _AS_TEXT):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.hasobject else [value.shape, value.tobytes()]
    if hasattr(value, "tobytes"):  # Pillow images
        return [getattr(value, "size", None), value.tobytes()]
    return type(value).__name__


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain)


def _without_folders(value: Any) -> Any:
    """A column of images or videos with paths and URLs shortened to the names of their files."""
    if isinstance(value, str):
        return value if value.startswith("data:") else value.replace("\\", "/").rpartition("/")[2]
    if isinstance(value, pathlib.PurePath):
        return value.name
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    return [_without_folders(item) for item in value] if isinstance(value, (list, tuple)) else value


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {repr(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, (list, tuple)) else value
