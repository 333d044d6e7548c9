"""Arrow columns as NumPy arrays. Arrow's own conversion imports pandas, which takes a second and 60 MB."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def numbers_of(column: Any) -> NDArray[Any]:
    """The values of a column of numbers or truth values. If some are missing, all are floats, and these are NaN."""
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
