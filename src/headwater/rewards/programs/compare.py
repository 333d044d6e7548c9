"""Whether output or a return value is what a test expects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_TOLERANCE = 1e-6
"""Relative and absolute difference of numbers with a decimal point: data sets print them with 6 digits or more."""


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same words in each line; spaces and empty lines at the end do not count."""
    lines, wanted = _lines(printed), _lines(expected)
    if lines == wanted:
        return True
    if len(lines) != len(wanted):
        return False
    return all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(map(str.split, lines), map(str.split, wanted), strict=True)
    )


def same_value(returned: Any, expected: Any) -> bool:
    """Whether a returned value equals the expected one, both as JSON values. Some data sets put it in a list of one."""
    if _equal(returned, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(returned, expected[0])


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n").split("\n")


def _same_word(word: str, other: str) -> bool:
    if word == other:
        return True
    # Two whole numbers are compared as text: a float has too few digits for them.
    if "." not in word + other and "e" not in (word + other).lower():
        return False
    try:
        return _close(float(word), float(other))
    except ValueError:
        return False


def _close(number: float, other: float) -> bool:
    try:
        return math.isclose(number, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # a whole number that is too large for a float
        return False


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, float) or isinstance(other, float):
        is_number = isinstance(value, int | float) and isinstance(other, int | float)
        return is_number and (value == other or _close(value, other))
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        # JSON has only text as keys.
        mine, theirs = ({str(key): entry for key, entry in each.items()} for each in (value, other))
        return mine.keys() == theirs.keys() and all(_equal(entry, theirs[key]) for key, entry in mine.items())
    return type(value) is type(other) and bool(value == other)
