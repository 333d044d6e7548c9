"""Bytes of a request to a JSON object, and back."""

from __future__ import annotations

import json
from typing import Any

from headwater.engine.server.errors import ApiError


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; nothing at all is an empty one."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
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


_KINDS = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
