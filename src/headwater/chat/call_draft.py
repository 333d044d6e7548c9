"""One tool call while it is read, and arguments that a format writes as text without types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.chat.call_json import BadCall, check_characters, checked_name, load_json
from headwater.chat.reader import ArgumentText, CallBegun, CallDone, Reader, Steps
from headwater.core.tool_calls import MalformedCall, ToolCall

_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words for values of JSON, which models mix up."""


class CallDraft:
    """Reports the parts of a call as they become known. Ends with ``complete`` or ``fail``."""

    def __init__(self, reader: Reader, start: int, call_id: str = "") -> None:
        """The call's text begins at ``start`` of the message."""
        self._reader = reader
        self._start = start
        self._call_id = call_id
        self._name = ""
        self.has_begun = False

    def set_id(self, call_id: str) -> None:
        """Use an identifier that the model wrote."""
        if not self.has_begun:
            self._call_id = call_id

    def begin(self, name: str) -> None:
        """The name is known."""
        self._call_id = self._call_id or self._reader.new_call_id()
        self._name, self.has_begun = name, True
        self._reader.report(CallBegun(self._call_id, name))

    def argument_text(self, text: str) -> None:
        """More of the arguments, as JSON. All of them together are the JSON of what ``complete`` gets."""
        if text:
            self._reader.report(ArgumentText(text))

    def complete(self, name: str, arguments: Mapping[str, Any]) -> None:
        if not self.has_begun:
            self.begin(name)
            self.argument_text(json.dumps(dict(arguments), ensure_ascii=False))
        self._reader.report(CallDone(ToolCall(self._call_id, name, arguments)))

    def fail(self, error: BadCall) -> None:
        """The text that was read so far is not a call."""
        call_id = self._call_id or self._reader.new_call_id()
        text = self._reader.text_from(self._start)
        self._reader.report(CallDone(MalformedCall(call_id, text, str(error), self._name or error.name)))


def read_marked_call(
    reader: Reader, begin: str, end: str, *others: str, read: Callable[[Reader, CallDraft], Steps[None]]
) -> Steps[None]:
    """Read a call that stands between two marks; the reader is behind ``begin``.

    The call also ends where another one, or one of ``others``, begins. What ``read`` refuses is a malformed call.
    """
    draft = CallDraft(reader, reader.place - len(begin))
    with reader.fenced(end, begin, *others):
        try:
            yield from read(reader, draft)
        except BadCall as error:
            yield from reader.until()
            draft.fail(error)
    yield from reader.accept(end)


def read_section(
    reader: Reader, section: tuple[str, str], call: tuple[str, str], *, read: Callable[[Reader, CallDraft], Steps[None]]
) -> Steps[None]:
    """Read a message of content and calls. The marks around the calls of a ``section`` are optional, and those of a
    ``call`` are not."""
    opening, closing = section
    begin, end = call
    while mark := (yield from reader.content_until(opening, begin, closing)):
        if mark == begin:
            yield from read_marked_call(reader, begin, end, closing, read=read)


class TextArguments:
    """The arguments of one call, such as ``<parameter=count>3</parameter>``, typed by the schema of its tool.

    A value whose type is ``string`` stays as it is. Other values are JSON. Without a schema, a value is JSON if it can
    be read as JSON, and text otherwise.
    """

    def __init__(self, draft: CallDraft, name: str, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._draft = draft
        self._name = checked_name(name)
        self._types = _types_of(schemas, name)
        self._values: dict[str, Any] = {}
        draft.begin(name)

    def add(self, key: str, text: str) -> None:
        if key in self._values:
            raise BadCall(f"the argument {key!r} is given twice; write it once", self._name)
        check_characters(key + text, f"the argument {key!r}")
        value = self._typed(key, text)
        opening = ", " if self._values else "{"
        self._values[key] = value
        self._draft.argument_text(
            f"{opening}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        )

    def complete(self) -> None:
        self._draft.argument_text("}" if self._values else "{}")
        self._draft.complete(self._name, self._values)

    def _typed(self, key: str, text: str) -> Any:
        types = self._types.get(key)
        if types is not None and "string" in types:
            return text
        stripped = text.strip()
        try:
            return load_json(_WORDS.get(stripped, stripped), f"the argument {key!r}")
        except BadCall as error:
            if not types:
                return text
            raise BadCall(f"{error}; its type is {' or '.join(sorted(types))}", self._name) from None


def _types_of(schemas: Sequence[Mapping[str, Any]], name: str) -> dict[str, set[str]]:
    """The types of each argument of the tool ``name``. An empty set if the schema does not say."""
    for schema in schemas:
        function = schema.get("function", schema)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return {key: _types(each) for key, each in properties.items()} if isinstance(properties, Mapping) else {}
    return {}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list | tuple) else set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            types |= _types(each)
    if not types and isinstance(schema.get("enum"), list | tuple):
        types = {"string"} if all(isinstance(each, str) for each in schema["enum"]) else set()
    return types
