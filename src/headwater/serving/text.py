"""From sampled tokens to text, piece by piece.

    stream = TextStream(tokenizer, TextRules(stops=("END",)))
    stream.push([5, 9])                # "Hello, E" gives "Hello, ": the E may begin the stop text
    stream.finish([17], "stop")        # the rest, without "END"

Pieces never hold half of a character, and joined they are the text of all tokens, cut before the stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.protocols import Tokenizer
from headwater.core.records import StopReason

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet one."""
_NUM_CONTEXT_TOKENS = 16
"""Tokens decoded once more before new ones; more than enough to hold a whole character."""


@dataclass(frozen=True)
class TextRules:
    """What of a response its text shows; the tokens themselves are never cut."""

    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    keep_stop: bool = False
    """Leave the stop text, or the token that ended the response, in the text."""


@dataclass(frozen=True)
class Ending:
    """How a response ended: its last piece of text, and the stop text or stop token behind a ``stop``."""

    text: str
    matched: str | int | None


class TextStream:
    """The text of one response. Work per piece does not grow with what came before it."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._context: list[int] = []  # the last tokens before them: some decoders treat a first token differently
        self._open: list[int] = []  # tokens whose text may still change
        self._open_length = 0  # characters of the open tokens' text that are final, and already in _waiting
        self._waiting = ""  # decoded text that may turn out to begin a stop text
        self.num_characters = 0
        """Length of the text that is certain, held back or not."""
        self.num_uncertain = 0
        """Replacement characters behind it: the text of bytes that the next token may yet make a character."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that became certain with ``tokens``."""
        self._decode(tokens, final=False)
        return self._release(self._num_held_back())

    def finish(self, tokens: Sequence[int], stop_reason: StopReason) -> Ending:
        """The last piece, when the response ends after ``tokens``."""
        if stop_reason != "stop" or not tokens:
            self._decode(tokens, final=True)
            return Ending(self._release(0), None)
        self._decode(tokens[:-1], final=False)
        # A stop text counts only if the last token completed it: earlier ones did not end the response.
        before_last = len(self._waiting)
        saved = (list(self._context), list(self._open), self._open_length, self._waiting)
        self._decode(tokens[-1:], final=True)
        match = self._find_stop(before_last)
        if match is not None:
            stop, start = match
            self._waiting = self._waiting if self._rules.keep_stop else self._waiting[:start]
            return Ending(self._release(0), stop)
        if not self._rules.keep_stop:
            self._context, self._open, self._open_length, self._waiting = saved
            self._decode((), final=True)
        return Ending(self._release(0), tokens[-1])

    def _decode(self, tokens: Sequence[int], *, final: bool) -> None:
        self._open.extend(tokens)
        if not self._open:
            return
        known = self._text_of(self._context)
        text = self._text_of(self._context + self._open)[len(known) :]
        certain = text if final else text.rstrip(_REPLACEMENT)
        self.num_uncertain = len(text) - len(certain)
        self._waiting += certain[self._open_length :]
        self.num_characters += max(0, len(certain) - self._open_length)
        self._open_length = max(self._open_length, len(certain))
        if text and certain == text:
            self._context, self._open, self._open_length = self._open[-_NUM_CONTEXT_TOKENS:], [], 0

    def _text_of(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(
            tokens, skip_special_tokens=self._rules.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _release(self, num_held_back: int) -> str:
        end = len(self._waiting) - num_held_back
        released, self._waiting = self._waiting[:end], self._waiting[end:]
        return released

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop text."""
        for length in range(min(len(self._waiting), self._longest_stop() - 1), 0, -1):
            end = self._waiting[-length:]
            if any(stop.startswith(end) for stop in self._rules.stops):
                return length
        return 0

    def _longest_stop(self) -> int:
        return max((len(stop) for stop in self._rules.stops), default=1)

    def _find_stop(self, before_last: int) -> tuple[str, int] | None:
        """The first stop text that ends behind ``before_last``, and where it begins."""
        found = []
        for stop in self._rules.stops:
            start = self._waiting.find(stop, max(0, before_last - len(stop) + 1))
            if start >= 0:
                found.append((start, stop))
        return (min(found)[1], min(found)[0]) if found else None
