"""Mistral: a list of calls after ``[TOOL_CALLS]``, or in newer models a name and arguments.

    [TOOL_CALLS][{"name": "search", "arguments": {"query": "tides"}}]
    [TOOL_CALLS]search[ARGS]{"query": "tides"}[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1, "b": 2}

``[ARGS]`` and ``[CALL_ID]`` are optional.
"""

from __future__ import annotations

from headwater.chat.call_draft import CallDraft
from headwater.chat.call_grammar import CallShape
from headwater.chat.call_json import BadCall, checked_name
from headwater.chat.call_object import pass_call, read_named_call, settle
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_BEGIN, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


@PARSERS.register
class Mistral(CallFormat):
    template_marks = (_BEGIN,)

    def shape(self, template: str) -> CallShape:
        if _ARGUMENTS in template:
            return CallShape(_BEGIN, _ARGUMENTS, "", separator="")
        return CallShape('{"name": "', '", "arguments": ', "}", separator=", ", opening=f"{_BEGIN}[", closing="]")

    def read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(_BEGIN)):
            start = reader.place - len(_BEGIN)
            with reader.fenced(_BEGIN):
                yield from reader.skip_spaces()
                if (yield from reader.has_more()) and reader.peeked in "[{":
                    yield from _read_list(reader, start)
                else:
                    yield from _read_call(reader, CallDraft(reader, start))


def _read_list(reader: Reader, start: int) -> Steps[None]:
    is_list, separator = bool((yield from reader.accept("["))), ","
    while separator:
        yield from reader.skip_spaces()
        draft, place = CallDraft(reader, start), reader.place
        if not (yield from pass_call(reader, draft)):
            yield from reader.until()  # nothing shows where a broken call ends
        settle(draft, reader.text_from(place))
        if not is_list:
            return
        yield from reader.skip_spaces()
        separator = yield from reader.accept(",")
        start = reader.place
    yield from reader.accept("]")


def _read_call(reader: Reader, draft: CallDraft) -> Steps[None]:
    try:
        text, mark = yield from reader.until(_CALL_ID, _ARGUMENTS, "{")
        name = text.strip()
        if not mark:
            raise BadCall(f"the call has no arguments; write {_BEGIN}name{_ARGUMENTS}{{...}}")
        if mark == _CALL_ID:
            call_id, mark = yield from reader.until(_ARGUMENTS, "{")
            draft.set_id(checked_name(call_id.strip()))
        if mark == "{":
            reader.go_back(reader.place - 1)
        yield from read_named_call(reader, draft, name)
    except BadCall as error:
        yield from reader.until()
        draft.fail(error)
