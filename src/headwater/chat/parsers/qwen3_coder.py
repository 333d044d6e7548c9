"""Qwen3-Coder: arguments between XML tags.

    <tool_call>
    <function=search>
    <parameter=query>
    tides
    </parameter>
    </function>
    </tool_call>

The outer tags may be missing. The schemas of the tools give the types of the arguments.
"""

from __future__ import annotations

from headwater.chat.call_draft import CallDraft, TextArguments
from headwater.chat.call_grammar import CallShape, KeyedArguments
from headwater.chat.call_json import BadCall
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


@PARSERS.register
class Qwen3Coder(CallFormat):
    template_marks = (_BEGIN, _FUNCTION)

    def shape(self, template: str) -> CallShape:
        keyed = KeyedArguments(_PARAMETER, ">\n", f"{_PARAMETER_END}\n", plain_text="[^<]*")
        begin, end = f"{_BEGIN}\n{_FUNCTION}", f"{_FUNCTION_END}\n{_END}"
        return CallShape(begin, ">\n", end, separator="\n", arguments=keyed)

    def read(self, reader: Reader) -> Steps[None]:
        while mark := (yield from reader.content_until(_BEGIN, _FUNCTION)):
            draft = CallDraft(reader, reader.place - len(mark))
            with reader.fenced(_FUNCTION_END, _END, _BEGIN):
                try:
                    if mark == _BEGIN:
                        yield from reader.skip_spaces()
                        if not (yield from reader.accept(_FUNCTION)):
                            raise BadCall(f"{_BEGIN} is not followed by <function=name>")
                    yield from _read_function(reader, draft)
                except BadCall as error:
                    yield from reader.until()
                    draft.fail(error)
            yield from reader.accept(_FUNCTION_END)
            yield from reader.accept_after_spaces(_END)


def _read_function(reader: Reader, draft: CallDraft) -> Steps[None]:
    name, end = yield from reader.until(">")
    if not end:
        raise BadCall(f"{_FUNCTION}name has no closing >")
    arguments = TextArguments(draft, name.strip(), reader.schemas)
    while True:
        yield from reader.skip_spaces()
        if not (yield from reader.has_more()):
            arguments.complete()
            return
        if not (yield from reader.accept(_PARAMETER)):
            raise BadCall(f"the call contains text outside of <parameter=name>...{_PARAMETER_END}", name.strip())
        key, end = yield from reader.until(">")
        value, value_end = yield from reader.until(_PARAMETER_END)
        if not end or not value_end:
            raise BadCall(f"the parameter {key.strip()[:40]!r} is not closed with {_PARAMETER_END}", name.strip())
        arguments.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))
