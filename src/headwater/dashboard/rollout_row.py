"""A row of a rollout file as the page shows it: numbers, texts, messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headwater.dashboard.plain_values import finite, jsonable

ROW_COLUMNS = (
    "step", "uid", "sample", "data_source", "reward", "response_length", "prompt_length", "stop_reason", "ended_by",
    "num_turns", "num_tool_calls", "num_failed_calls", "logprob_gap", "advantages", "loss_mask", "prompt", "response",
)  # fmt: skip
_PROMPT_CHARACTERS, _RESPONSE_CHARACTERS = 200, 300
MOST_CHARACTERS = 200_000
_MOST_MESSAGES = 2000


def row_of(id: str, values: Mapping[str, Any], prompt_characters: int = _PROMPT_CHARACTERS) -> dict[str, Any]:
    """The line of a rollout in a listing."""
    return {
        "id": id,
        "step": values.get("step"),
        "uid": text(values.get("uid")),
        "sample": values.get("sample"),
        "data_source": text(values.get("data_source")),
        "reward": finite(values.get("reward")),
        "length": response_length(values),
        "prompt_length": values.get("prompt_length"),
        "stop_reason": text(values.get("stop_reason")),
        "ended_by": values.get("ended_by"),
        "turns": values.get("num_turns"),
        "tool_calls": values.get("num_tool_calls") or 0,
        "failures": values.get("num_failed_calls") or 0,
        "gap": finite(values.get("logprob_gap")),
        "advantage": _advantage(values),
        "prompt": text(values.get("prompt"))[:prompt_characters],
        "response": text(values.get("response"))[:_RESPONSE_CHARACTERS],
    }


def response_length(values: Mapping[str, Any]) -> int:
    known = values.get("response_length")
    if isinstance(known, int):
        return known
    return max(0, len(values.get("loss_mask", ())) - int(values.get("prompt_length") or 0))


def _advantage(values: Mapping[str, Any]) -> float | None:
    """The advantage of the last trained token."""
    advantages, mask = values.get("advantages"), values.get("loss_mask")
    if advantages is None or mask is None or len(advantages) != len(mask):
        return None
    trained = np.flatnonzero(mask)
    return finite(advantages[trained[-1]]) if len(trained) else None


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def parsed(value: object, default: Any) -> Any:
    """JSON that the run wrote; ``default`` if there is none or it is damaged."""
    if not isinstance(value, str) or not value:
        return default
    try:
        return jsonable(json.loads(value))
    except (ValueError, RecursionError):
        return default


def messages_of(value: object, media: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The conversation. Content in parts becomes text, and arguments of tool calls become JSON text.

    A message with images or videos also has ``parts``, in which they are named by their digests. A part without a
    digest is the next one of ``media``.
    """
    found = parsed(value, [])
    if not isinstance(found, list):
        return []
    left = {kind: [item["digest"] for item in media if item["kind"] == kind] for kind in ("image", "video")}
    return [_message(each, left) for each in found[:_MOST_MESSAGES] if isinstance(each, Mapping)]


def _message(given: Mapping[str, Any], left: dict[str, list[str]]) -> dict[str, Any]:
    calls = given.get("tool_calls")
    parts = _parts(given.get("content"), left)
    return {
        **({"parts": parts} if any(part["type"] != "text" for part in parts) else {}),
        "role": str(given.get("role", "")),
        "content": _content(given.get("content"))[:MOST_CHARACTERS],
        "tool_calls": [_call(each) for each in calls if isinstance(each, Mapping)] if isinstance(calls, list) else [],
        "name": given.get("name") if isinstance(given.get("name"), str) else None,
    }


def _parts(content: object, left: dict[str, list[str]]) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return []
    parts: list[dict[str, Any]] = []
    for each in content:
        kind = str(each.get("type", "text")).removesuffix("_url") if isinstance(each, Mapping) else "text"
        if kind not in left:
            parts.append({"type": "text", "text": _content([each])[:MOST_CHARACTERS]})
            continue
        next_one = left[kind].pop(0) if left[kind] else None
        digest = each.get("digest")
        parts.append({"type": kind, "digest": digest if isinstance(digest, str) else next_one})
    return parts


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [
            each.get("text", f"[{each.get('type', 'part')}]") if isinstance(each, Mapping) else each for each in content
        ]
        return "".join(map(str, parts))
    return json.dumps(content, ensure_ascii=False)


def _call(given: Mapping[str, Any]) -> dict[str, str]:
    function = given.get("function")
    call = function if isinstance(function, Mapping) else given
    arguments = call.get("arguments", "")
    told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": str(call.get("name", "")), "arguments": told}
