"""Reads a model's message while it arrives.

A format of tool calls is a generator that reads the message as if it were complete:

    while (yield from reader.content_until("<tool_call>")):
        text, end = yield from reader.until("</tool_call>")
        ...

The reader suspends the generator where the text has not arrived yet. What the generator finds therefore does not
depend on how the text was split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from headwater.chat.render import REASONING
from headwater.core.tool_calls import MalformedCall, ToolCall

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns a ``T``."""
_ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Mistral's templates refuse identifiers that do not have nine letters or digits."""


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text that is certainly not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose name is known. Its arguments follow."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """More of the arguments of the call that began last, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """The call is complete, or cannot be read. A ``ToolCall`` has begun before; a ``MalformedCall`` may have begun."""

    call: ToolCall | MalformedCall


CallEvent = ContentText | CallBegun | ArgumentText | CallDone
"""What a stream of a parser reports while the model's message arrives.

Joined, the ``ContentText`` of a stream is ``ParsedReply.content``, and its ``CallDone`` are ``ParsedReply.calls``.
"""


class Reader:
    """The text that has arrived, and the events that were found in it."""

    def __init__(
        self, schemas: Sequence[Mapping[str, Any]], hidden: Sequence[str], salt: str, *, in_reasoning: bool
    ) -> None:
        self.schemas = schemas
        self._hidden = tuple(hidden)
        self._salt = salt
        self._reasoning_end = next(iter(REASONING.values())) if in_reasoning else ""
        self._text = ""
        self._place = 0
        self._is_complete = False
        self._fence: tuple[str, ...] = ()
        self._fence_place: int | None = None
        self._searched = 0
        self._events: list[CallEvent] = []
        self._num_calls = 0
        self._spaces = ""  # at the end of the content so far; dropped if a call follows
        self._has_content = False

    # Arriving text and found events

    def add(self, text: str) -> None:
        self._text += text

    def complete(self) -> None:
        self._is_complete = True

    def take_events(self) -> list[CallEvent]:
        taken, self._events = self._events, []
        return taken

    # Reading

    @property
    def place(self) -> int:
        return self._place

    @property
    def peeked(self) -> str:
        """The next character, after ``has_more`` returned True."""
        return self._text[self._place]

    def text_from(self, start: int) -> str:
        """What was read since ``start``."""
        return self._text[start : self._place]

    def go_back(self, place: int) -> None:
        self._place = place

    def has_more(self) -> Steps[bool]:
        """Whether another character follows, before the fence or the end of the message."""
        while True:
            end, is_final = self._readable()
            if self._place < end:
                return True
            if is_final:
                return False
            yield

    def skip_spaces(self) -> Steps[None]:
        while (yield from self.has_more()):
            if not self.peeked.isspace():
                return
            self._place += 1

    def accept(self, *literals: str) -> Steps[str]:
        """Read one of ``literals``, if the text continues with it. Return it, or an empty string."""
        while True:
            end, is_final = self._readable()
            rest = self._text[self._place : min(end, self._place + max(map(len, literals)))]
            possible = [each for each in literals if each.startswith(rest) or rest.startswith(each)]
            found = max((each for each in possible if rest.startswith(each)), key=len, default="")
            if is_final or all(len(each) <= len(found) for each in possible):
                self._place += len(found)
                return found
            yield

    def accept_after_spaces(self, literal: str) -> Steps[None]:
        """Read ``literal`` and spaces before it. Read nothing if it does not follow."""
        place = self._place
        yield from self.skip_spaces()
        if not (yield from self.accept(literal)):
            self._place = place

    def until(self, *ends: str) -> Steps[tuple[str, str]]:
        """Read up to and including the first of ``ends``. Return the text before it, and the end.

        Without an end, read everything and return an empty string as the end.
        """
        marks, start, searched = marks_of(ends), self._place, self._place
        while True:
            end, is_final = self._readable()
            found = marks.find(self._text, searched, end, is_complete=is_final)
            if found is not None:
                self._place = found[0] + len(found[1])
                return self._text[start : found[0]], found[1]
            if is_final:
                self._place = end
                return self._text[start:end], ""
            searched = marks.certain(self._text, searched, end)
            yield

    def next_text(self) -> Steps[str]:
        """The text that has arrived, at least one character. Empty at the end."""
        if not (yield from self.has_more()):
            return ""
        start, (self._place, _) = self._place, self._readable()
        return self._text[start : self._place]

    @contextmanager
    def fenced(self, *fence: str) -> Iterator[None]:
        """Within the block, the text ends where one of ``fence`` begins. ``accept`` reads the fence afterwards."""
        self._fence, self._fence_place, self._searched = fence, None, self._place
        try:
            yield
        finally:
            self._fence = ()

    def _readable(self) -> tuple[int, bool]:
        """Where the text that can be read now ends, and whether nothing follows it."""
        if not self._fence:
            return len(self._text), self._is_complete
        marks, end = marks_of(self._fence), len(self._text)
        if self._fence_place is None:
            found = marks.find(self._text, self._searched, end, is_complete=self._is_complete)
            if found is None:
                certain = end if self._is_complete else marks.certain(self._text, self._searched, end)
                self._searched = max(self._searched, certain)
                return certain, self._is_complete
            self._fence_place = found[0]
        return self._fence_place, True

    # Content

    def content_until(self, *starts: str) -> Steps[str]:
        """Pass text on as content up to one of ``starts``. Read and return it; empty at the end of the message."""
        while True:
            if self._reasoning_end:
                yield from self._pass_reasoning()
            mark = yield from self._pass_until((*starts, *REASONING))
            if mark not in REASONING:
                return mark
            self._write_mark(mark)
            self._reasoning_end = REASONING[mark]

    def content_before_text(self) -> Steps[bool]:
        """Pass reasoning and spaces on as content. Return whether other text follows."""
        while True:
            if self._reasoning_end:
                yield from self._pass_reasoning()
            elif mark := (yield from self.accept(*REASONING, *self._hidden)):
                self._write_mark(mark)
                self._reasoning_end = REASONING.get(mark, "")
            elif not (yield from self.has_more()):
                return False
            elif not self.peeked.isspace():
                return True
            else:
                self._write(self.peeked)
                self._place += 1

    def _pass_reasoning(self) -> Steps[None]:
        self._write_mark((yield from self._pass_until((self._reasoning_end,))))
        self._reasoning_end = ""

    def _pass_until(self, ends: tuple[str, ...]) -> Steps[str]:
        """Pass text on as content up to one of ``ends``, without hidden marks. Read and return that end."""
        marks = marks_of((*ends, *self._hidden))
        while True:
            end, is_final = self._readable()
            found = marks.find(self._text, self._place, end, is_complete=is_final)
            certain = found[0] if found else end if is_final else marks.certain(self._text, self._place, end)
            self._write(self._text[self._place : certain])
            self._place = certain
            if found is not None:
                self._place += len(found[1])
                if found[1] in ends:
                    return found[1]
            elif is_final:
                return ""
            else:
                yield

    def _write_mark(self, mark: str) -> None:
        if mark not in self._hidden:
            self._write(mark)

    def _write(self, text: str) -> None:
        """Add to the content. Spaces are held back until other text follows."""
        body = text.rstrip()
        if body:
            is_after_call = self._num_calls > 0 and not self._has_content
            written = (self._spaces + body).lstrip() if is_after_call else self._spaces + body
            self._events.append(ContentText(written))
            self._has_content, self._spaces = True, ""
        self._spaces += text[len(body) :]

    def finish_content(self) -> None:
        """At the end of the message: spaces after a call are dropped, spaces of a message without calls are kept."""
        if self._spaces and not self._num_calls:
            self._events.append(ContentText(self._spaces))
        self._spaces = ""

    # Calls, through ``CallDraft``

    def new_call_id(self) -> str:
        digest = hashlib.blake2b(f"{self._salt}/{self._num_calls}".encode(errors="replace"), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        digits = [_ID_DIGITS[number // 36**place % 36] for place in range(_ID_LENGTH)]
        return "".join(digits)

    def report(self, event: CallBegun | ArgumentText | CallDone) -> None:
        self._spaces = ""
        self._num_calls += isinstance(event, CallDone)
        self._events.append(event)


class Marks:
    """Finds the first of several strings. The answer does not depend on how the text was split."""

    def __init__(self, marks: Iterable[str]) -> None:
        # At the same place the longest mark counts.
        known = sorted({mark for mark in marks if mark}, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None
        self._beginnings = frozenset(mark[:length] for mark in known for length in range(1, len(mark)))
        self._longest = max(map(len, known), default=0)

    def find(self, text: str, start: int, end: int, *, is_complete: bool) -> tuple[int, str] | None:
        """The place of the first mark in ``text[start:end]``, and the mark.

        If the text is not complete, a mark counts only if no other mark can turn out to begin before it.
        """
        match = self._pattern.search(text, start, end) if self._pattern else None
        if match is None or not (is_complete or match.start() < self.certain(text, start, end)):
            return None
        return match.start(), match.group()

    def certain(self, text: str, start: int, end: int) -> int:
        """The place up to which ``text[start:end]`` cannot belong to a mark that has not arrived completely."""
        for length in range(min(self._longest - 1, end - start), 0, -1):
            if text[end - length : end] in self._beginnings:
                return end - length
        return end


@lru_cache(maxsize=64)
def marks_of(marks: tuple[str, ...]) -> Marks:
    return Marks(marks)
