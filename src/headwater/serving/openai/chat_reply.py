"""Replies of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.core.protocols import Tokenizer
from headwater.serving.openai.plan import Plan
from headwater.serving.openai.usage import fingerprint, head, usage
from headwater.serving.output import Piece, token_bytes, token_text

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"


class ChatReply:
    """Writes the pieces of a plan as OpenAI does, whole or in chunks."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def whole(self, pieces: Sequence[Piece], version: int) -> dict[str, Any]:
        reply: dict[str, Any] = {
            **head(self._plan, KIND),
            "system_fingerprint": fingerprint(version),
            "choices": [self._whole_choice(place, piece) for place, piece in enumerate(pieces)],
            "usage": usage(self._plan, sum(len(piece.tokens) for piece in pieces)),
        }
        if self._plan.shape.token_ids:
            reply["prompt_token_ids"] = self._plan.requests[0].input_tokens
        return reply

    def chunks(self, place: int, piece: Piece, version: int) -> list[dict[str, Any]]:
        """The role first, as OpenAI does; then text; the reason for the end in a chunk of its own."""
        shape = self._plan.shape
        chunks = []
        if place not in self._begun:
            chunk = self._chunk([self._delta(place, {"role": "assistant", "content": ""}, None, None)], version)
            if shape.token_ids and not self._begun:
                chunk["prompt_token_ids"] = self._plan.requests[0].input_tokens
            self._begun.add(place)
            chunks.append(chunk)
        if piece.text or (piece.tokens and (shape.logprobs or shape.token_ids)):
            chunks.append(self._chunk([self._delta(place, {"content": piece.text}, piece, None)], version))
        if piece.stop_reason is not None:
            chunks.append(self._chunk([self._delta(place, {}, None, piece.stop_reason)], version))
        return chunks

    def last_chunk(self, num_completion_tokens: int, version: int) -> dict[str, Any]:
        return {**self._chunk([], version), "usage": usage(self._plan, num_completion_tokens)}

    def _chunk(self, choices: list[dict[str, Any]], version: int) -> dict[str, Any]:
        chunk = {**head(self._plan, CHUNK_KIND), "system_fingerprint": fingerprint(version), "choices": choices}
        if self._plan.shape.include_usage:
            chunk["usage"] = None
        return chunk

    def _whole_choice(self, place: int, piece: Piece) -> dict[str, Any]:
        shape = self._plan.shape
        choice: dict[str, Any] = {
            "index": place,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece) if shape.logprobs else None,
            "finish_reason": piece.stop_reason,
        }
        if shape.token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _delta(self, place: int, delta: dict[str, Any], piece: Piece | None, ending: str | None) -> dict[str, Any]:
        shape = self._plan.shape
        choice: dict[str, Any] = {"index": place, "delta": delta, "logprobs": None, "finish_reason": ending}
        if piece is not None and shape.logprobs:
            choice["logprobs"] = self._logprobs(piece)
        if piece is not None and shape.token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        content = []
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            text = token_text(self._tokenizer, token)
            content.append({"token": text, "logprob": logprob, "bytes": token_bytes(text), "top_logprobs": []})
        return {"content": content, "refusal": None}
