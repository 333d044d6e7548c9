"""One response as the dialects write it: text beside tokens, log-probs and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.protocols import Tokenizer
from headwater.core.records import ModelResponse, StopReason
from headwater.engine.server.text import TextRules, TextStream


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
        # Offsets need the text after each single token, whatever the pieces are.
        self._lengths = TextStream(tokenizer, TextRules(skip_special_tokens=rules.skip_special_tokens))
        self._with_offsets = with_offsets

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
            offsets=self._offsets(tokens) if self._with_offsets else (),
            stop_reason=stop_reason,
            matched=matched,
        )

    def _offsets(self, tokens: Sequence[int]) -> tuple[int, ...]:
        offsets = []
        for token in tokens:
            offsets.append(self._lengths.num_characters)
            self._lengths.push([token])
        return tuple(offsets)


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
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
