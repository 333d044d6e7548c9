"""Answers as bytes."""

from __future__ import annotations

import json
from typing import Any


def encoded(answer: Any) -> bytes:
    """Strict JSON: the page could not read NaN. Half of a surrogate pair, which UTF-8 does not have, stays escaped."""
    try:
        return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
