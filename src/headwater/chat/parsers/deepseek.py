"""DeepSeek V3, R1 and V3.1. The bars of the marks are full-width, and their lines are ``▁``.

V3 and R1 write the arguments in a Markdown fence:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search
    ```json
    {"query": "tides"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes ``<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "tides"}<｜tool▁call▁end｜>``.
"""

from __future__ import annotations

from headwater.chat.call_draft import CallDraft, read_section
from headwater.chat.call_grammar import CallShape
from headwater.chat.call_json import BadCall
from headwater.chat.call_object import read_named_call
from headwater.chat.parsers import PARSERS, CallFormat
from headwater.chat.reader import Reader, Steps

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIND = "function"


@PARSERS.register
class Deepseek(CallFormat):
    template_marks = (_BEGIN, _SEPARATOR)

    def shape(self, template: str) -> CallShape:
        if "```json" in template:
            begin, middle, end = f"{_BEGIN}{_KIND}{_SEPARATOR}", "\n```json\n", f"\n```{_END}"
            return CallShape(begin, middle, end, separator="\n", opening=_SECTION, closing=_SECTION_END)
        return CallShape(_BEGIN, _SEPARATOR, _END, separator="", opening=_SECTION, closing=_SECTION_END)

    def read(self, reader: Reader) -> Steps[None]:
        yield from read_section(reader, (_SECTION, _SECTION_END), (_BEGIN, _END), read=_read_call)


def _read_call(reader: Reader, draft: CallDraft) -> Steps[None]:
    text, mark = yield from reader.until(_SEPARATOR)
    if not mark:
        raise BadCall(f"the call has no {_SEPARATOR} between the tool's name and the arguments")
    name = text.strip()
    yield from reader.skip_spaces()
    if name == _KIND and (yield from reader.has_more()) and reader.peeked != "{":
        text, _ = yield from reader.until("\n")
        name = text.strip()
    yield from reader.skip_spaces()
    is_fenced = yield from reader.accept("```json")
    yield from read_named_call(reader, draft, name, ending="```" if is_fenced else "")
