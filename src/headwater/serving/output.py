"""One response as the dialects write it: text beside tokens, log-probs and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.protocols import Tokenizer
from headwater.core.records import ModelResponse, StopReason
from headwater.serving.text import TextRules, TextStream

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """A part of a response: all of it, or what one delta of a stream brought."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    """Where each token's text begins in the response's text; empty unless asked for."""
    stop_reason: StopReason | None = None
    matched: str | int | None = None
    """The stop text or token behind a ``stop``."""


class PieceMaker:
    """Turns the deltas of one response into pieces."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules, *, with_offsets: bool = False) -> None:
        self._text = TextStream(tokenizer, rules)
        self._offsets = Offsets(tokenizer, rules.skip_special_tokens) if with_offsets else None

    def piece(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        stop_reason: StopReason | None,
    ) -> Piece:
        matched: str | int | None = None
        if stop_reason is None:
            text = self._text.push(tokens)
        else:
            ending = self._text.finish(tokens, stop_reason)
            text, matched = ending.text, ending.matched
        return Piece(
            text=text,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            offsets=() if self._offsets is None else tuple(self._offsets.next(token) for token in tokens),
            stop_reason=stop_reason,
            matched=matched,
        )


class Offsets:
    """Where the text of each token begins; that of one that goes on with a character, where the character begins."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._text = TextStream(tokenizer, TextRules(skip_special_tokens=skip_special_tokens))
        self._one_for_each_byte = _one_for_each_byte(tokenizer)

    def next(self, token: int) -> int:
        """The offset of ``token``, which comes after all that were given before."""
        start, num_uncertain = self._text.num_characters, self._text.num_uncertain
        text = self._text.push([token]) + _REPLACEMENT * self._text.num_uncertain
        if not num_uncertain or not self._has_text(token):
            return start + num_uncertain
        num_not_characters = len(text) - len(text.lstrip(_REPLACEMENT))
        if num_not_characters < len(text):
            # What it left as it was, it did not go on with.
            return start + min(num_uncertain, num_not_characters)
        if self._one_for_each_byte:
            return start  # all of them may yet be one character
        # At least the last one shows bytes of this token.
        return start + min(num_uncertain, max(0, num_not_characters - 1))

    def _has_text(self, token: int) -> bool:
        return bool(self._tokenizer.decode([token], skip_special_tokens=self._skip_special_tokens))


def whole(response: ModelResponse, tokenizer: Tokenizer, rules: TextRules, *, with_offsets: bool = False) -> Piece:
    """A finished response as one piece."""
    return PieceMaker(tokenizer, rules, with_offsets=with_offsets).piece(
        response.output_tokens, response.output_logprobs, response.output_versions, response.stop_reason
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself, special ones spelled out; bytes that are no whole character show as U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def token_bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None where the token is only part of a character and so has no text."""
    return None if _REPLACEMENT in text else list(text.encode())


def _one_for_each_byte(tokenizer: Tokenizer) -> bool:
    """Whether half a character shows as U+FFFD for each of its bytes, as SentencePiece has it, or as a single one."""
    tokens = tokenizer.encode("\U0010fffd", add_special_tokens=False)  # no vocabulary has it whole
    return any(tokenizer.decode(tokens[:end]).count(_REPLACEMENT) > 1 for end in range(1, len(tokens)))
