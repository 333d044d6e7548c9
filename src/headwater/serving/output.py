"""The text of a response, and the pieces in which the APIs send it.

    stream = TextStream(tokenizer, TextRules(stops=("END",)))
    stream.push([5, 9])                # "Hello, E" yields "Hello, ": the E may begin the stop text
    stream.finish([17], "stop")        # the rest, without "END"

Pieces never contain part of a character. Joined, they are the text of all tokens up to the stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.protocols import Tokenizer
from headwater.core.requests import Alternatives, Delta, ModelResponse, PromptScores, StopReason

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write this for bytes that are not, or not yet, a character."""
_NUM_CONTEXT_TOKENS = 16
"""How many earlier tokens are decoded again with new ones. A character never spans more tokens than this."""


@dataclass(frozen=True)
class TextRules:
    """Which parts of a response its text shows. The tokens are always complete."""

    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    keep_stop: bool = False
    """Keep the stop text, or the token that ended the response, in the text."""


@dataclass(frozen=True)
class Ending:
    """The end of a response: its last piece of text, and the stop text or stop token that matched."""

    text: str
    matched: str | int | None


class TextStream:
    """The text of one response. The work per piece does not depend on the length of the response."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._context: list[int] = []  # the tokens before _open: some decoders treat the first token differently
        self._open: list[int] = []  # tokens whose text may still change
        self._open_length = 0  # the final characters of the open tokens' text, already in _waiting
        self._waiting = ""  # decoded text that may begin a stop text
        self.num_characters = 0
        """The length of the final text, including text that is held back."""
        self.num_uncertain = 0
        """The number of replacement characters after it: bytes that the next token may complete to a character."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became final with ``tokens``."""
        self._decode(tokens, final=False)
        return self._release(self._num_held_back())

    def finish(self, tokens: Sequence[int], stop_reason: StopReason) -> Ending:
        """The last piece of a response that ends with ``tokens``."""
        if stop_reason != "stop" or not tokens:
            self._decode(tokens, final=True)
            return Ending(self._release(0), None)
        self._decode(tokens[:-1], final=False)
        # Only a stop text that the last token completes can have ended the response.
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
        """The length of the longest suffix of the text that is a prefix of a stop text."""
        for length in range(min(len(self._waiting), self._longest_stop() - 1), 0, -1):
            end = self._waiting[-length:]
            if any(stop.startswith(end) for stop in self._rules.stops):
                return length
        return 0

    def _longest_stop(self) -> int:
        return max((len(stop) for stop in self._rules.stops), default=1)

    def _find_stop(self, before_last: int) -> tuple[str, int] | None:
        """The first stop text that ends after ``before_last``, and where it begins."""
        found = []
        for stop in self._rules.stops:
            start = self._waiting.find(stop, max(0, before_last - len(stop) + 1))
            if start >= 0:
                found.append((start, stop))
        return (min(found)[1], min(found)[0]) if found else None


@dataclass(frozen=True)
class OutputPiece:
    """A complete response, or the part of it that one delta of a stream adds."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    """Where each token's text begins in the response's text. Empty unless requested."""
    stop_reason: StopReason | None = None
    matched: str | int | None = None
    """The stop text or stop token that ended the response."""
    top_logprobs: tuple[Alternatives, ...] = ()
    prompt_scores: PromptScores | None = None


class PieceMaker:
    """Converts the deltas of one response to pieces."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules, *, with_offsets: bool = False) -> None:
        self._text = TextStream(tokenizer, rules)
        self._offsets = Offsets(tokenizer, rules.skip_special_tokens) if with_offsets else None

    def piece(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        stop_reason: StopReason | None,
        top_logprobs: Sequence[Alternatives] = (),
        prompt_scores: PromptScores | None = None,
    ) -> OutputPiece:
        matched: str | int | None = None
        if stop_reason is None:
            text = self._text.push(tokens)
        else:
            ending = self._text.finish(tokens, stop_reason)
            text, matched = ending.text, ending.matched
        return OutputPiece(
            text=text,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            offsets=() if self._offsets is None else tuple(self._offsets.next(token) for token in tokens),
            stop_reason=stop_reason,
            matched=matched,
            top_logprobs=tuple(top_logprobs),
            prompt_scores=prompt_scores,
        )


class Offsets:
    """Where the text of each token begins. A token that continues a character has the offset of that character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._text = TextStream(tokenizer, TextRules(skip_special_tokens=skip_special_tokens))
        self._one_for_each_byte = _one_for_each_byte(tokenizer)

    def next(self, token: int) -> int:
        """The offset of the next token."""
        start, num_uncertain = self._text.num_characters, self._text.num_uncertain
        text = self._text.push([token]) + _REPLACEMENT * self._text.num_uncertain
        if not num_uncertain or not self._has_text(token):
            return start + num_uncertain
        num_not_characters = len(text) - len(text.lstrip(_REPLACEMENT))
        if num_not_characters < len(text):
            # It did not continue the characters that it left unchanged.
            return start + min(num_uncertain, num_not_characters)
        if self._one_for_each_byte:
            return start  # all of them may become one character
        # At least the last replacement character contains bytes of this token.
        return start + min(num_uncertain, max(0, num_not_characters - 1))

    def _has_text(self, token: int) -> bool:
        return bool(self._tokenizer.decode([token], skip_special_tokens=self._skip_special_tokens))


def whole(
    response: ModelResponse, tokenizer: Tokenizer, rules: TextRules, *, with_offsets: bool = False
) -> OutputPiece:
    """A complete response as one piece."""
    delta = Delta.of(response)
    return PieceMaker(tokenizer, rules, with_offsets=with_offsets).piece(
        delta.tokens, delta.logprobs, delta.versions, delta.stop_reason, delta.top_logprobs, delta.prompt_scores
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token, including special tokens. Incomplete characters are shown as U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def token_bytes(text: str) -> list[int] | None:
    """The bytes of a token's text, or None if the token is only part of a character."""
    return None if _REPLACEMENT in text else list(text.encode())


def _one_for_each_byte(tokenizer: Tokenizer) -> bool:
    """Whether an incomplete character is decoded to one U+FFFD per byte, as in SentencePiece, or to a single one."""
    tokens = tokenizer.encode("\U0010fffd", add_special_tokens=False)  # no vocabulary has a token for it
    return any(tokenizer.decode(tokens[:end]).count(_REPLACEMENT) > 1 for end in range(1, len(tokens)))
