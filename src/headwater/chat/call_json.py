"""Tool calls as JSON objects: ``{"name": "search", "arguments": {"query": "tides"}}``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 64
"""Deeper values are refused: templates and JSON writers descend into them recursively."""
_MAX_DIGITS = 1000
_OPENING = {"{": "}", "[": "]"}
_NAME = re.compile(r"[\w./:-]+")
_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')


class BadCall(Exception):
    """Text that is not a call. The message helps the model to write a better one."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name
        """The tool's name, if it is known."""


def load_json(text: str, what: str = "the call") -> Any:
    """The value of a JSON text. Refuses what Python accepts although it is not JSON, and what is ambiguous."""
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 10) : error.pos + 10]
        raise BadCall(f"{what} is not valid JSON: {error.msg} at character {error.pos} (near {near!r})") from None
    except RecursionError:
        raise BadCall(f"{what} is nested more than {MAX_DEPTH} levels deep; use fewer levels") from None
    if not _is_shallow(value):
        raise BadCall(f"{what} is nested more than {MAX_DEPTH} levels deep; use fewer levels")
    check_characters(text if "\\u" not in text else json.dumps(value, ensure_ascii=False), what)
    return value


def check_characters(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadCall(f"{what} contains half of a surrogate pair, which is not a character; remove it") from None


def checked_name(name: str) -> str:
    """``name``, if it can be the name of a tool."""
    if _NAME.fullmatch(name) is None:
        shown = name if len(name) <= 40 else f"{name[:40]}..."
        raise BadCall(f"{shown!r} is not the name of a tool")
    return name


def read_call(value: Any, keys: Sequence[str] = ("arguments",)) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call object. ``keys`` are the names that the arguments may have."""
    if not isinstance(value, dict):
        raise BadCall(f'a call must be a JSON object with "name" and "{keys[0]}", not {_kind(value)}')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise BadCall('the call has no "name"; write the name of a tool')
    checked_name(name)
    given = [key for key in keys if key in value]
    if len(given) > 1:
        raise BadCall(f"the call has both {given[0]!r} and {given[1]!r}; write only one", name)
    others = [key for key in ("arguments", "parameters") if key in value and key not in keys]
    if not given and others:
        raise BadCall(f'the call has "{others[0]}" instead of "{keys[0]}"', name)
    return name, read_arguments(value[given[0]] if given else None, name)


def read_arguments(value: Any, name: str) -> dict[str, Any]:
    """The arguments of a call: an object, the JSON text of one, or nothing."""
    if isinstance(value, str):
        try:
            value = load_json(value, "the text of the arguments")
        except BadCall as error:
            raise BadCall(str(error), name) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadCall(f"the arguments must be a JSON object, not {_kind(value)}", name)
    return value


class JsonExtent:
    """Finds the end of a JSON value that arrives piece by piece. It does not check the value."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        """The value cannot be JSON: a bracket is closed that was not opened."""
        self._closing: list[str] = []
        self._has_begun = self._in_text = self._is_escaped = False

    def feed(self, text: str) -> int:
        """Take more text. Return how many of its characters belong to the value."""
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            place = self._in_string(text, place) if self._in_text else self._outside(text, place)
        return place

    def _in_string(self, text: str, place: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        match = _IN_STRING.search(text, place)
        if match is None:
            return len(text)
        self._is_escaped = match.group() == "\\"
        if not self._is_escaped:
            self._in_text = False
            self.is_done = not self._closing
        return match.end()

    def _outside(self, text: str, place: int) -> int:
        character = text[place]
        if character in _OPENING or character == '"':
            if self._has_begun and not self._closing:
                self.is_done = True  # a number or word ends here
                return place
            self._has_begun, self._in_text = True, character == '"'
            if character in _OPENING:
                self._closing.append(_OPENING[character])
            return place + 1
        if self._closing:
            if character not in "}]":
                match = _STRUCTURE.search(text, place)
                return match.start() if match else len(text)
            self.is_broken = self._closing.pop() != character
            self.is_done = not self._closing and not self.is_broken
            return place + (not self.is_broken)
        if character in ",:}]" or character.isspace():
            self.is_done, self.is_broken = self._has_begun, not self._has_begun
            return place
        self._has_begun = True
        return place + 1


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadCall(f"the key {twice!r} appears twice in the same object; write it once")
    return value


def _refuse_constant(word: str) -> None:
    raise BadCall(f"{word} is not JSON; use a finite number or null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadCall(f"the number {text[:20]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise BadCall(f"the number {text[:20]}... has {len(text)} digits, and the limit is {_MAX_DIGITS}")
    return int(text)


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for each in level for part in _parts(each)]
        if not level:
            return True
    return False


def _parts(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else "an object")
