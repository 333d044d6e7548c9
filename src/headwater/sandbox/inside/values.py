"""Plain values as JSON, between a program and the tests that judge it.

Only values of Python's own types come out of ``decode``: no class of the program, and so no method of it, ever reaches
the tests. An object of another type stays in the program, and the tests get a ``Handle`` to it.
"""

from __future__ import annotations

import base64
import collections
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_ITEMS = 1_000_000
"""Longest iterator that is read to its end."""
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
}


@dataclass(frozen=True, eq=False)
class Handle:
    """An object that lives in the program. It is equal only to itself."""

    number: int
    text: str
    """What ``repr`` says about it."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value. ``keep`` encodes, or refuses, an object that is not plain."""
    if value is None or isinstance(value, (bool, str)) or type(value) is list:
        return [encode(each, keep) for each in value] if isinstance(value, list) else _plain(value)
    if isinstance(value, numbers.Number):
        return _encode_number(value, keep)
    if isinstance(value, dict):
        pairs = [[encode(key, keep), encode(each, keep)] for key, each in value.items()]
        return {"type": "dict", "items": pairs}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"type": "bytes", "value": base64.b64encode(bytes(value)).decode()}
    if (kind := _sequence_kind(value)) is not None:
        items = [encode(each, keep) for each in _limited(value)]
        return items if kind == "list" else {"type": kind, "items": items}
    if hasattr(type(value), "tolist"):  # arrays and their elements
        return encode(value.tolist(), keep)
    return keep(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else str.__str__(value)


def _encode_number(value: Any, keep: Callable[[Any], Any]) -> Any:
    if isinstance(value, Decimal):
        return {"type": "decimal", "value": str(value)}
    if isinstance(value, Fraction):
        return {"type": "fraction", "value": f"{value.numerator:x}/{value.denominator:x}"}
    if isinstance(value, numbers.Integral):
        return {"type": "int", "value": f"{int(value):x}"}
    if isinstance(value, numbers.Real):
        return {"type": "float", "value": float(value).hex()}
    if isinstance(value, numbers.Complex):
        number = complex(value)
        return {"type": "complex", "value": [number.real.hex(), number.imag.hex()]}
    return keep(value)


def _sequence_kind(value: Any) -> str | None:
    for kind, name in (
        (list, "list"),
        (tuple, "tuple"),
        (set, "set"),
        (frozenset, "frozenset"),
        (collections.deque, "deque"),
        (range, "range"),
        (Iterator, "iterator"),
        ((type({}.keys()), type({}.values()), type({}.items())), "list"),
    ):
        if isinstance(value, kind):
            return name if name != "range" else "list"
    return None


def _limited(value: Any) -> Iterator[Any]:
    for place, each in enumerate(value):
        if place == _MAX_ITEMS:
            raise ValueError(f"more than {_MAX_ITEMS} items")
        yield each


def decode(encoded: Any, find: Callable[[dict[str, Any]], Any]) -> Any:
    """Decode a value. ``find`` returns what stands for an object that is not plain."""
    if encoded is None or isinstance(encoded, (bool, str)):
        return encoded
    if isinstance(encoded, list):
        return [decode(each, find) for each in encoded]
    kind = encoded["type"]
    if kind == "int":
        return int(encoded["value"], 16)
    if kind == "float":
        return float.fromhex(encoded["value"])
    if kind == "dict":
        return {decode(key, find): decode(value, find) for key, value in encoded["items"]}
    if kind == "bytes":
        return base64.b64decode(encoded["value"])
    if kind == "decimal":
        return Decimal(encoded["value"])
    if kind == "fraction":
        above, below = encoded["value"].split("/")
        return Fraction(int(above, 16), int(below, 16))
    if kind == "complex":
        real, imaginary = encoded["value"]
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(each, find) for each in encoded["items"]])
    return find(encoded)
