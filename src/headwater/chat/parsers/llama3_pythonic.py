"""Llama 3.2 and Llama 4: ``[search(query="tides"), add(a=1, b=2)]``.

The list must be the whole message, apart from reasoning, and may stand between ``<|python_start|>`` and
``<|python_end|>``. It is parsed as Python, and never evaluated.
"""

from __future__ import annotations

import re

from headwater.chat.call_draft import CallDraft
from headwater.chat.call_grammar import CallShape, KeyedArguments
from headwater.chat.call_json import BadCall
from headwater.chat.call_python import PythonExtent, read_python_calls
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[^\W\d][\w.]*")


@PARSERS.register
class Llama3Pythonic(CallFormat):
    template_marks = ("[func_name1(", "params_name1=", "params_value1")

    def shape(self, template: str) -> CallShape:
        keyed = KeyedArguments("", "=", "", separator=", ")
        return CallShape("", "(", ")", separator=", ", opening="[", closing="]", arguments=keyed)

    def read(self, reader: Reader) -> Steps[None]:
        if (yield from reader.content_before_text()):
            start = reader.place
            yield from reader.accept(_START)
            yield from reader.skip_spaces()
            list_start = reader.place
            if (yield from _is_call_list(reader)):
                reader.go_back(list_start)
                yield from _read_list(reader, start)
                yield from reader.accept_after_spaces(_END)
            else:
                reader.go_back(start)
        yield from reader.content_until()


def _is_call_list(reader: Reader) -> Steps[bool]:
    """Whether the text continues with ``[name(``. A list of other things is content."""
    if not (yield from reader.accept("[")):
        return False
    name, end = yield from reader.until("(", "]", ",", '"', "'", "\n\n")
    return end == "(" and _NAME.fullmatch(name.strip()) is not None


def _read_list(reader: Reader, start: int) -> Steps[None]:
    list_start, extent = reader.place, PythonExtent()
    while not extent.is_done and (text := (yield from reader.next_text())):
        reader.go_back(reader.place - len(text) + extent.feed(text))
    try:
        calls = read_python_calls(reader.text_from(list_start))
    except BadCall as error:
        CallDraft(reader, start).fail(error)
        return
    for name, arguments in calls:
        CallDraft(reader, start).complete(name, arguments)
