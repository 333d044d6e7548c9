"""Calls as plain JSON, as models without a special format write them.

The whole message, apart from reasoning, is one call, a list of calls, or several calls in a row:

    {"name": "search", "arguments": {"query": "tides"}}

Also accepted are OpenAI's shapes, ``{"tool_calls": [...]}`` and ``{"type": "function", "function": {...}}``, and a
Markdown fence around the JSON. Other JSON is content.
"""

from __future__ import annotations

from headwater.chat.call_grammar import CallShape
from headwater.chat.call_object import read_bare_calls
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_FENCE = "```"


@PARSERS.register
class OpenaiJson(CallFormat):
    """Never chosen from a template, because no template describes it."""

    def shape(self, template: str) -> CallShape:
        return CallShape('{"name": "', '", "arguments": ', "}", separator=", ", opening="[", closing="]")

    def read(self, reader: Reader) -> Steps[None]:
        if (yield from reader.content_before_text()):
            start = reader.place
            is_fenced = bool((yield from reader.accept("```json", _FENCE)))
            yield from reader.skip_spaces()
            if (yield from read_bare_calls(reader, start)):
                if is_fenced:
                    yield from reader.accept_after_spaces(_FENCE)
            else:
                reader.go_back(start)
        yield from reader.content_until()
