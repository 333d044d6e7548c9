"""Reads and checks chat messages, adds the system prompt, and splits ``<image>`` and ``<video>`` placeholders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.core.errors import DataError

Message = dict[str, Any]


def read_messages(row: Mapping[str, Any], key: str, system_prompt: str, place: str) -> list[Message]:
    """The messages in column ``key``. A plain string is read as one user message."""
    if row.get(key) is None:
        have = ", ".join(row) or "none"
        raise DataError(f"{place}: no {key!r}; the row has {have}; set data.prompt_key to the column with the chat")
    value = row[key]
    if not isinstance(value, (str, list, tuple)):
        raise DataError(f"{place}: {key} is a {type(value).__name__}; must be a list of messages or a string")
    if not value or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{place}: {key} is empty; write a prompt or remove the row")
    if isinstance(value, str):
        messages: list[Message] = [{"role": "user", "content": value}]
    else:
        messages = [_checked(message, f"{place}: {key}[{number}]") for number, message in enumerate(value)]
    if system_prompt and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def split_placeholders(messages: Sequence[Message], kinds: Sequence[str]) -> list[Message]:
    """Split text content into parts: ``"<image>What is this?"`` becomes an image part and a text part."""
    pattern = re.compile("(" + "|".join(f"<{kind}>" for kind in kinds) + ")")
    return [
        {**message, "content": _parts(message["content"], pattern)} if isinstance(message["content"], str) else message
        for message in messages
    ]


def without_nones(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys whose value is None. Parquet adds them to rows that lack a key, and chat templates would see them."""
    return {key: value for key, value in mapping.items() if value is not None}


def _parts(content: str, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    segments = [segment for segment in pattern.split(content) if segment]
    return [
        {"type": segment[1:-1]} if pattern.fullmatch(segment) else {"type": "text", "text": segment}
        for segment in segments
    ]


def _checked(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is a {type(message).__name__}; must be a message {{'role': ..., 'content': ...}}")
    known = without_nones(message)
    if not isinstance(known.get("role"), str) or not known["role"]:
        raise DataError(f"{where}.role = {known.get('role')!r}; must be 'system', 'user', 'assistant' or 'tool'")
    content = known.setdefault("content", None)
    if isinstance(content, (list, tuple)):
        known["content"] = [_checked_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
    elif content is None and "tool_calls" not in known:
        raise DataError(f"{where}.content is missing; must be a string or a list of parts")
    elif content is not None and not isinstance(content, str):
        raise DataError(f"{where}.content is a {type(content).__name__}; must be a string or a list of parts")
    return known


def _checked_part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise DataError(f"{where} = {part!r}; must be a part such as {{'type': 'text', 'text': ...}}")
    return without_nones(part)
