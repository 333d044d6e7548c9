"""Answers as bytes."""

from __future__ import annotations

import json
from typing import Any

from headwater.dashboard.plain_values import jsonable


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
