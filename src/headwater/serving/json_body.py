"""Bytes of a request to a JSON object, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.serving.errors import ApiError


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; nothing at all is an empty one."""
    if not body.strip():
        return {}
    try:
        value = _load(body)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: {error}; send JSON in UTF-8", code="bad_json") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the body is not valid JSON: {reason}", code="bad_json") from error
    if not isinstance(value, dict):
        raise ApiError(f"the body is a JSON {_KINDS.get(type(value), 'value')}; send an object", code="bad_json")
    return value


def write(value: Any) -> bytes:
    # NaN is no JSON, and a log-prob that is NaN is a broken model: better an error than an answer nobody can read.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _load(body: bytes) -> Any:
    """As ``json.loads``, without the NaN and Infinity that Python takes for JSON."""
    constants: list[_Constant] = []

    def note(name: str) -> _Constant:
        constants.append(_Constant(name))
        return constants[-1]

    value = json.loads(body, parse_constant=note)
    if constants:
        place = _place_of(constants[0], value) or "the body"
        raise ApiError(
            f"{place} = {constants[0].name}: is not a JSON number; send a finite one, or leave it out",
            param=place,
            code="bad_json",
        )
    return value


@dataclass(frozen=True, eq=False)
class _Constant:
    name: str


def _place_of(wanted: _Constant, value: Any, place: str = "") -> str | None:
    """Where ``wanted`` stands in ``value``: ``sampling_params.stop[2]``."""
    if value is wanted:
        return place
    parts: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        parts = ((f"{place}.{name}" if place else name, each) for name, each in value.items())
    elif isinstance(value, list):
        parts = ((f"{place}[{number}]", each) for number, each in enumerate(value))
    return next((found for name, each in parts if (found := _place_of(wanted, each, name)) is not None), None)


_KINDS = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
