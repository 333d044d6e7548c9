"""Grammars that make a model write tool calls, for ``tool_choice: required`` or a named function.

A grammar is written in the Lark syntax of llguidance. A call consists of fixed text, such as
``<tool_call>{"name": "search", "arguments": ``, and the arguments, which must match the schema of the tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.chat.render import REASONING, special_tokens
from headwater.core.protocols import Tokenizer
from headwater.core.requests import Grammar

_WHITESPACE = {"whitespace_pattern": "[ ]?"}
"""Between two parts of a JSON text: at most one space, as in the calls that chat templates write."""


@dataclass(frozen=True)
class KeyedArguments:
    """Arguments that are written one by one, as ``<parameter=query>tides</parameter>``."""

    before_key: str
    after_key: str
    after_value: str
    separator: str = ""
    plain_text: str = ""
    """A regular expression for texts that are written without quotes. Empty if texts are JSON."""


@dataclass(frozen=True)
class CallShape:
    """How a format writes a list of calls."""

    before_name: str
    after_name: str
    after_arguments: str
    separator: str
    opening: str = ""
    closing: str = ""
    number: str = ""
    """A regular expression between the name and ``after_name``: the number of the call."""
    arguments: KeyedArguments | None = None
    """None if the arguments are a JSON object."""


def call_grammar(
    shape: CallShape,
    schemas: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    is_parallel: bool,
    in_reasoning: bool = False,
    answer: str | None = None,
) -> Grammar:
    """A grammar of one or more calls of the functions in ``schemas``.

    With ``answer``, a JSON schema, the model may also write such a JSON text instead of calls.
    """
    writer = _Writer(special_tokens(tokenizer))
    names = [writer.call(shape, _function(schema), number) for number, schema in enumerate(schemas)]
    call = f"({' | '.join(names)})"
    more = f" ({writer.text(shape.separator)} {call})*" if is_parallel else ""
    calls = f"{writer.text(shape.opening)} {call}{more} {writer.text(shape.closing)}"
    if answer is not None:
        writer.rules.append(f"answer: {_json_rule(json.loads(answer))}")
        calls = f"({calls}) | answer"
    if in_reasoning:
        end = REASONING["<think>"]
        ending = "" if end in writer.special else f'[suffix="{end}"]'
        writer.rules.append(f"reasoning{ending}: /(.|\\n)*/ {writer.text(end) if not ending else ''}")
        calls = f"reasoning /[ \\n]{{0,4}}/ ({calls})"
    return Grammar("lark", "\n".join([f"start: {calls}", *writer.rules]))


class _Writer:
    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.special = special
        self._marks = re.compile("|".join(sorted(map(re.escape, special), key=len, reverse=True))) if special else None

    def text(self, text: str) -> str:
        """Fixed text. A special token is a separate token, which ordinary text does not match."""
        parts, place = [], 0
        for match in self._marks.finditer(text) if self._marks else ():
            parts += [_quoted(text[place : match.start()]), f"<[{self.special[match.group()]}]>"]
            place = match.end()
        return " ".join(part for part in [*parts, _quoted(text[place:])] if part)

    def call(self, shape: CallShape, function: Mapping[str, Any], number: int) -> str:
        """Add the rule of one function. Return its name."""
        name = str(function["name"])
        # A tool has the arguments of its schema and no others, unless the schema says so.
        schema = {"type": "object", "additionalProperties": False, **(function.get("parameters") or {})}
        if shape.arguments is None:
            self.rules.append(f"arguments_{number}: {_json_rule(schema)}")
            arguments = f"arguments_{number}"
        else:
            arguments = self._keyed(shape.arguments, schema, number)
        count = f"/{shape.number}/" if shape.number else ""
        before = self.text(shape.before_name + name)
        after = self.text(shape.after_name)
        self.rules.append(f"call_{number}: {before} {count} {after} {arguments} {self.text(shape.after_arguments)}")
        return f"call_{number}"

    def _keyed(self, keyed: KeyedArguments, schema: Mapping[str, Any], number: int) -> str:
        """The required arguments in their order, then the optional ones; each only after the one before it."""
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = [key for key in properties if key in (schema.get("required") or ())]
        optional = [key for key in properties if key not in required]
        parts = []
        for place, key in enumerate([*required, *optional]):
            value = properties[key] if isinstance(properties[key], Mapping) else {}
            rule = f"value_{number}_{place}"
            shared = {each: schema[each] for each in ("$defs", "definitions") if each in schema}
            self.rules.append(f"{rule}: {self._value(keyed, value, shared)}")
            before = (keyed.separator if place else "") + keyed.before_key + key + keyed.after_key
            parts.append(f"{self.text(before)} {rule} {self.text(keyed.after_value)}")
        chain = ""
        for part in reversed(parts[len(required) :]):
            chain = f"({part} {chain})?"
        return " ".join([*parts[: len(required)], chain])

    def _value(self, keyed: KeyedArguments, schema: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
        if not keyed.plain_text or schema.get("type") != "string":
            return _json_rule({**shared, **schema})
        if choices := [str(each) for each in schema.get("enum") or ()]:
            return " | ".join(map(self.text, choices))
        return f"/{keyed.plain_text}/"


def _function(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = schema.get("function", schema)
    return function


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _WHITESPACE})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
