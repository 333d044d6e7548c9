"""One tool call while it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headwater.chat.call_events import ArgumentText, CallBegun, CallDone
from headwater.chat.call_json import BadCall
from headwater.chat.reader import Reader, Steps
from headwater.core.tool_calls import MalformedCall, ToolCall


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
