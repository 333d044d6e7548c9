"""Calls as Python expressions: ``[search(query="tides"), add(a=1, b=2)]``. They are parsed, never evaluated."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from headwater.chat.call_json import MAX_DEPTH, BadCall, load_json

_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}
"""Values as in JSON, which models mix with those of Python."""
_MAX_CHARACTERS = 2**20
"""Longer calls are refused, because Python's parser needs hundreds of bytes for each character."""
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_TOKEN = re.compile(r"[\"'\\()\[\]{}]")


class PythonExtent:
    """Finds the end of a bracketed Python expression that arrives piece by piece. It does not check the expression."""

    def __init__(self) -> None:
        self.is_done = False
        self._closing: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Take more text. Return how many of its characters belong to the expression."""
        place = 0
        while place < len(text) and not self.is_done:
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            match = _TOKEN.search(text, place)
            if match is None:
                return len(text)
            place = match.end()
            self._take(match.group())
        return place

    def _take(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = bool(self._quote)
        elif self._quote:
            self._quote = "" if character == self._quote else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in _BRACKETS:
            self._closing.append(_BRACKETS[character])
        elif self._closing and self._closing.pop() == character:
            self.is_done = not self._closing
        else:
            self.is_done = True  # a bracket that was not opened: the parser says so


def read_python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in a list."""
    tree = _parse(text)
    if not isinstance(tree, ast.List):
        raise BadCall("the calls are not a list; write [name(argument=value), ...]")
    return [_read_call(each) for each in tree.elts]


def _parse(text: str) -> ast.expr:
    if len(text) > _MAX_CHARACTERS:
        raise BadCall(f"the calls have {len(text)} characters, and the limit is {_MAX_CHARACTERS}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise BadCall(f"the calls are not valid Python: {error.msg} (line {error.lineno})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "nested too deeply" if not isinstance(error, ValueError) else str(error)
        raise BadCall(f"the calls are not valid Python: {reason}") from None


def _read_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise BadCall("an entry of the list is not a call; write name(argument=value)")
    name = _name_of(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise BadCall("arguments must be written as name=value", name)
    arguments = {str(keyword.arg): _value(keyword.value, name, MAX_DEPTH) for keyword in node.keywords}
    if len(arguments) < len(node.keywords):
        raise BadCall("an argument is given twice; write it once", name)
    try:
        # Through JSON, so that the arguments are what a client would be sent.
        return name, dict(load_json(json.dumps(arguments, ensure_ascii=False), "the call"))
    except (ValueError, RecursionError):
        raise BadCall("an argument cannot be written as JSON", name) from None


def _name_of(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise BadCall("a call needs the name of a tool before its arguments")
    return ".".join([node.id, *reversed(parts)])


def _value(node: ast.expr, name: str, num_levels: int) -> Any:
    if num_levels == 0:
        raise BadCall(f"an argument is nested more than {MAX_DEPTH} levels deep; use fewer levels", name)
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand, name, num_levels - 1)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each, name, num_levels - 1) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key, name, num_levels - 1) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
            raise BadCall("the keys of an object must be different texts", name)
        return dict(zip(keys, (_value(each, name, num_levels - 1) for each in node.values), strict=True))
    raise BadCall("the value of an argument must be a number, a text, True, False, None, a list or an object", name)
