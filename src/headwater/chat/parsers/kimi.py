"""Kimi K2: ``functions.search:0`` is the identifier of a call, which contains the tool's name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "tides"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from headwater.chat.call_draft import CallDraft, read_section
from headwater.chat.call_grammar import CallShape
from headwater.chat.call_json import BadCall, checked_name
from headwater.chat.call_object import read_named_call
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@PARSERS.register
class Kimi(CallFormat):
    template_marks = (_BEGIN, _ARGUMENTS)

    def shape(self, template: str) -> CallShape:
        return CallShape(
            f"{_BEGIN}functions.",
            _ARGUMENTS,
            _END,
            separator="",
            opening=_SECTION,
            closing=_SECTION_END,
            number=":[0-9]",
        )

    def read(self, reader: Reader) -> Steps[None]:
        yield from read_section(reader, (_SECTION, _SECTION_END), (_BEGIN, _END), read=_read_call)


def _read_call(reader: Reader, draft: CallDraft) -> Steps[None]:
    text, mark = yield from reader.until(_ARGUMENTS)
    if not mark:
        raise BadCall(f"the call has no {_ARGUMENTS}; write functions.name:0{_ARGUMENTS}{{...}}")
    call_id = checked_name(text.strip())
    draft.set_id(call_id)
    name, _, number = call_id.removeprefix("functions.").rpartition(":")
    if not name or not number.isdecimal():
        name = call_id.removeprefix("functions.")
    yield from read_named_call(reader, draft, name, ending="")
