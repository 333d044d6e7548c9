"""Values of any kind as numbers and JSON. Files can hold anything, and JSON has neither NaN nor infinities."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_MOST_DEPTH = 50


def number(value: object) -> float:
    """NaN for what is no number. A text of digits is a text."""
    if isinstance(value, (int, float, np.number)):
        try:
            return float(value)
        except (OverflowError, TypeError):  # a larger integer than a float can be, or a complex number
            return math.nan
    return math.nan


def finite(value: object) -> float | None:
    """None for what is no finite number. A truth value is not a number here."""
    found = math.nan if isinstance(value, bool) else number(value)
    return found if math.isfinite(found) else None


def floats(values: NDArray[Any]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def numbers_of(column: Any) -> NDArray[Any]:
    """The values of an Arrow column of numbers or truth values. If some are missing, all are floats, and these are NaN.

    Arrow's own conversion imports pandas, which takes a second and 60 MB.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if not (pa.types.is_integer(array.type) or pa.types.is_float32(array.type) or pa.types.is_float64(array.type)):
        raise ValueError(f"a column of {array.type} where numbers should be")
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(str(array.type), str(array.type)))
    if not len(array):
        return np.zeros(0, dtype)
    places = slice(array.offset, array.offset + len(array))
    validity, content = array.buffers()
    values = np.frombuffer(content, dtype)[places] if content is not None else np.zeros(len(array))
    if not array.null_count:
        return values
    is_there = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[places].astype(bool)
    return np.where(is_there, values, np.nan)


def jsonable(value: Any, depth: int = 0) -> Any:
    """Without NaN and infinities, and without endless depth."""
    if depth > _MOST_DEPTH:
        return "..."
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(each, depth + 1) for each in value]
    return value


def encoded(answer: Any) -> bytes:
    """Strict JSON: the page could not read NaN. Half of a surrogate pair, which UTF-8 does not have, stays escaped."""
    try:
        return _written(answer)
    except ValueError:  # a NaN that a file of the run had in a place where nothing looks at it
        return _written(jsonable(answer))


def _written(answer: Any) -> bytes:
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
