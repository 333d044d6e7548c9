"""Reads what a tool's ``execute`` returned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Real
from typing import Any

from headwater.core.records import is_reward
from headwater.core.tool_calls import ToolResult


class BadResult(Exception):
    """A tool returned something that cannot be given to the model. The text says what."""


def read_result(value: Any) -> ToolResult:
    """The result of a call from text, ``(text, reward, metrics)``, or an object with ``text``.

    Numbers, lists and dicts become JSON. ``BadResult`` for anything else.
    """
    if isinstance(value, tuple):
        return _from_tuple(value)
    reward, metrics = getattr(value, "reward", None), getattr(value, "metrics", None)
    if not isinstance(value, str) and isinstance(getattr(value, "text", None), str):
        return ToolResult(_text(value), _reward(reward), _metrics(metrics))
    return ToolResult(_text(value))


def _from_tuple(value: tuple[Any, ...]) -> ToolResult:
    if not 1 <= len(value) <= 3:
        raise BadResult(f"returned a tuple of {len(value)} values; return (text, reward, metrics)")
    response, reward, metrics = (*value, None, None)[:3]
    if isinstance(response, tuple):
        raise BadResult("returned a tuple inside a tuple; return (text, reward, metrics)")
    inner = read_result(response)
    return ToolResult(
        inner.text,
        inner.reward if reward is None else _reward(reward),
        {**inner.metrics, **_metrics(metrics)},
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    for kind in ("image", "video"):
        if getattr(value, kind, None):
            raise BadResult(f"returned a response with {kind}; results can only be text")
    text = getattr(value, "text", None)
    if isinstance(text, str):
        return text
    if isinstance(value, (bool, int, float, list, Mapping)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadResult(f"returned a {type(value).__name__} that is not JSON ({error})") from error
    raise BadResult(f"returned a {type(value).__name__}; return text, (text, reward, metrics) or a ToolResponse")


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or not is_reward(value):
        raise BadResult(f"returned the reward {value!r}; it must be a finite number")
    return float(value)


def _metrics(value: Any) -> dict[str, float]:
    """The numbers among the metrics. verl's tools also put text into them, which cannot be averaged."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadResult(f"returned the metrics {value!r}; they must be a dict of numbers")
    return {str(name): float(each) for name, each in value.items() if isinstance(each, Real) and is_reward(each)}
