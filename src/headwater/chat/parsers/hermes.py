"""Hermes, Qwen 2.5 and Qwen 3: ``<tool_call>{"name": "search", "arguments": {"query": "tides"}}</tool_call>``."""

from __future__ import annotations

from headwater.chat.call_draft import CallDraft
from headwater.chat.call_grammar import CallShape
from headwater.chat.call_object import read_call_object
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


@PARSERS.register
class Hermes(CallFormat):
    """The end mark always ends the call. A call at the end of the message does not need it."""

    template_marks = (_BEGIN,)

    def shape(self, template: str) -> CallShape:
        return CallShape('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")

    def read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(_BEGIN)):
            draft = CallDraft(reader, reader.place - len(_BEGIN))
            with reader.fenced(_END, _BEGIN):
                yield from reader.skip_spaces()
                yield from read_call_object(reader, draft)
            yield from reader.accept(_END)
