"""Values of any kind as numbers and JSON. Files can hold anything, and JSON has neither NaN nor infinities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
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
