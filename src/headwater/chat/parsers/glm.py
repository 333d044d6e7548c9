"""GLM 4.5 and later: the name, then keys and values between tags.

    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>tides</arg_value>
    </tool_call>

The schemas of the tools give the types of the arguments.
"""

from __future__ import annotations

from headwater.chat.call_draft import CallDraft, TextArguments, read_marked_call
from headwater.chat.call_grammar import CallShape, KeyedArguments
from headwater.chat.call_json import BadCall
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


@PARSERS.register
class Glm(CallFormat):
    template_marks = (_BEGIN, _KEY)

    def shape(self, template: str) -> CallShape:
        keyed = KeyedArguments(_KEY, f"{_KEY_END}\n{_VALUE}", f"{_VALUE_END}\n", plain_text="[^<]*")
        return CallShape(_BEGIN, "\n", _END, separator="\n", arguments=keyed)

    def read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(_BEGIN)):
            yield from read_marked_call(reader, _BEGIN, _END, read=_read_call)


def _read_call(reader: Reader, draft: CallDraft) -> Steps[None]:
    text, mark = yield from reader.until(_KEY)
    name = text.strip()
    arguments = TextArguments(draft, name, reader.schemas)
    while mark:
        key, end = yield from reader.until(_KEY_END)
        yield from reader.skip_spaces()
        has_value = yield from reader.accept(_VALUE)
        value, value_end = yield from reader.until(_VALUE_END)
        if not (end and has_value and value_end):
            raise BadCall(f"after {_KEY}, write key{_KEY_END}{_VALUE}value{_VALUE_END}", name)
        arguments.add(key.strip(), value)
        yield from reader.skip_spaces()
        mark = yield from reader.accept(_KEY)
    if (yield from reader.has_more()):
        raise BadCall(f"the call contains text outside of {_KEY} and {_VALUE}", name)
    arguments.complete()
