"""New tokens of a response as JSON. Numbers keep every bit: Python writes a float so that it reads back the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.engine.sequence import Delta


def line_of(delta: Delta) -> dict[str, Any]:
    """``stop_reason`` is there in the last one only."""
    line: dict[str, Any] = {"tokens": delta.tokens, "logprobs": delta.logprobs, "versions": delta.versions}
    return line if delta.stop_reason is None else {**line, "stop_reason": delta.stop_reason}
