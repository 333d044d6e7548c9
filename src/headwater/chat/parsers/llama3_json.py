"""Llama 3.1 and later: ``{"name": "search", "parameters": {"query": "tides"}}``, possibly after ``<|python_tag|>``.

Several calls are separated by semicolons. Without the tag, the call must be the whole message, apart from reasoning.
After the tag, calls of the built-in tools are read too: ``<|python_tag|>brave_search.call(query="tides")``.
"""

from __future__ import annotations

from headwater.chat.call_draft import CallDraft
from headwater.chat.call_grammar import CallShape
from headwater.chat.call_json import BadCall
from headwater.chat.call_object import read_bare_calls
from headwater.chat.call_python import read_python_calls
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_TAG = "<|python_tag|>"
_ENDS = ("<|eom_id|>", "<|eot_id|>")
_HINT = 'after <|python_tag|>, write {"name": ..., "parameters": {...}}'


@PARSERS.register
class Llama3Json(CallFormat):
    template_marks = ("<|start_header_id|>", '"parameters": ')

    def shape(self, template: str) -> CallShape:
        return CallShape('{"name": "', '", "parameters": ', "}", separator="; ")

    def read(self, reader: Reader) -> Steps[None]:
        if (yield from reader.content_before_text()):
            start = reader.place
            if reader.peeked in "{[" and not (yield from read_bare_calls(reader, start)):
                reader.go_back(start)
        while (yield from reader.content_until(_TAG, *_ENDS)) == _TAG:
            start = reader.place - len(_TAG)
            yield from reader.skip_spaces()
            place = reader.place
            if not (yield from read_bare_calls(reader, start)):
                reader.go_back(place)
                text, _ = yield from reader.until(*_ENDS)
                _read_built_in(reader, start, text)
        yield from reader.content_until()


def _read_built_in(reader: Reader, start: int, text: str) -> None:
    try:
        calls = read_python_calls(f"[{text}]")
        if not calls:
            raise BadCall("the call is empty")
    except BadCall as error:
        CallDraft(reader, start).fail(BadCall(f"{error}; {_HINT}", error.name))
        return
    for name, arguments in calls:
        CallDraft(reader, start).complete(name.removesuffix(".call"), arguments)
