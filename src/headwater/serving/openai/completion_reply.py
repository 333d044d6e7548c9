"""Replies of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.core.protocols import Tokenizer
from headwater.serving.openai.plan import Plan
from headwater.serving.openai.usage import fingerprint, head, usage
from headwater.serving.output import Piece, token_text

KIND = "text_completion"


class CompletionReply:
    """Writes the pieces of a plan as OpenAI does, whole or in chunks."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def whole(self, pieces: Sequence[Piece], version: int) -> dict[str, Any]:
        return {
            **head(self._plan, KIND),
            "system_fingerprint": fingerprint(version),
            "choices": [self._choice(place, piece, first=True) for place, piece in enumerate(pieces)],
            "usage": usage(self._plan, sum(len(piece.tokens) for piece in pieces)),
        }

    def chunks(self, place: int, piece: Piece, version: int) -> list[dict[str, Any]]:
        shape = self._plan.shape
        first = place not in self._begun
        self._begun.add(place)
        shows = piece.text or piece.stop_reason or (piece.tokens and (shape.logprobs or shape.token_ids))
        if not shows and not (first and shape.token_ids):
            return []
        return [self._chunk([self._choice(place, piece, first=first)], version)]

    def last_chunk(self, num_completion_tokens: int, version: int) -> dict[str, Any]:
        return {**self._chunk([], version), "usage": usage(self._plan, num_completion_tokens)}

    def _chunk(self, choices: list[dict[str, Any]], version: int) -> dict[str, Any]:
        chunk = {**head(self._plan, KIND), "system_fingerprint": fingerprint(version), "choices": choices}
        if self._plan.shape.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, place: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        shape = self._plan.shape
        choice: dict[str, Any] = {
            "index": place,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if shape.logprobs else None,
            "finish_reason": piece.stop_reason,
        }
        if shape.token_ids:
            if first:
                choice["prompt_token_ids"] = self._plan.requests[place].input_tokens
            choice["token_ids"] = piece.tokens
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [token_text(self._tokenizer, token) for token in piece.tokens],
            "token_logprobs": piece.logprobs,
            "top_logprobs": None,
            "text_offset": piece.offsets,
        }
