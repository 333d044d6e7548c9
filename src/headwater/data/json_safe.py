"""Converts Python values to JSON and back, preserving tuples, sets, dates and keys that are not strings."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_TUPLE, _SET, _ITEMS, _DATE, _DATETIME = "__tuple__", "__set__", "__items__", "__date__", "__datetime__"
_TAGS = {_TUPLE, _SET, _ITEMS, _DATE, _DATETIME}
_PLAIN = {type(None), bool, int, float, str}


def _is_plain(values: Iterable[Any]) -> bool:
    """Whether all values are the same in JSON. Thousands of tokens are checked without a call for each."""
    return set(map(type, values)) <= _PLAIN


def to_json_safe(value: Any) -> Any:
    """The value as dicts with string keys, lists and plain values. Other types become a tagged dict or text."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _TAGS & set(value):
            return {key: to_json_safe(item) for key, item in value.items()}
        return {_ITEMS: [[to_json_safe(key), to_json_safe(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: list(value) if _is_plain(value) else [to_json_safe(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {_SET: [to_json_safe(item) for item in sorted(value, key=repr)]}
    if isinstance(value, list):
        return list(value) if _is_plain(value) else [to_json_safe(item) for item in value]
    if isinstance(value, datetime.datetime):
        return {_DATETIME: value.isoformat()}
    if isinstance(value, datetime.date):
        return {_DATE: value.isoformat()}
    return str(value)


def from_json_safe(value: Any) -> Any:
    """The inverse of ``to_json_safe``."""
    if isinstance(value, list):
        return value if _is_plain(value) else [from_json_safe(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else None
    if tag == _TUPLE:
        return tuple(from_json_safe(value[tag]))
    if tag == _SET:
        return {from_json_safe(item) for item in value[tag]}
    if tag == _ITEMS:
        return {from_json_safe(key): from_json_safe(item) for key, item in value[tag]}
    if tag == _DATE:
        return datetime.date.fromisoformat(value[tag])
    if tag == _DATETIME:
        return datetime.datetime.fromisoformat(value[tag])
    return {key: from_json_safe(item) for key, item in value.items()}
