"""Prompts as tokens, checked against the engine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.core.protocols import EngineLimits, Tokenizer
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import checked_integers, checked_text


@dataclass(frozen=True)
class ModelLimits:
    """Turns prompts into tokens and checks requests against the engine's limits, with the client's field names."""

    tokenizer: Tokenizer
    engine: EngineLimits

    def tokens_of_text(self, text: Any, field: str) -> tuple[int, ...]:
        tokens = tuple(self.tokenizer.encode(checked_text(text, field)))
        return self._not_empty(tokens, field)

    def tokens_of_ids(self, ids: Any, field: str) -> tuple[int, ...]:
        if not isinstance(ids, list):
            raise wrong(field, ids, "must be a list of token ids")
        tokens = checked_integers(ids, field)
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.engine.vocab_size):
            place = next(place for place, token in enumerate(tokens) if not 0 <= token < self.engine.vocab_size)
            raise wrong(f"{field}[{place}]", tokens[place], f"no such token; ids are 0 to {self.engine.vocab_size - 1}")
        return self._not_empty(tokens, field)

    def num_new_tokens(
        self, num_prompt: int, asked: int | None, default: int | None, field: str, *, prompt_field: str
    ) -> int:
        """The response's length: ``asked`` if it fits the model, else ``default`` or everything that fits."""
        room = self.engine.max_model_tokens - num_prompt
        if room < (0 if asked == 0 else 1):
            raise ApiError(
                f"{prompt_field}: the prompt has {num_prompt} tokens, and the model supports "
                f"{self.engine.max_model_tokens} including the response; shorten the prompt",
                param=prompt_field,
                code="context_length_exceeded",
            )
        if asked is None:
            # At least 1, so that the engine explains what it needs for a prompt that fills the KV cache.
            room = max(1, self.engine.max_request_tokens - num_prompt)
            return room if default is None else min(room, default)
        if asked > room:
            raise wrong(
                field,
                asked,
                f"the prompt has {num_prompt} tokens and the model supports {self.engine.max_model_tokens} in total; "
                f"use at most {room}, or shorten the prompt",
                code="context_length_exceeded",
            )
        return asked

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        for place, token in enumerate(ids):
            if not 0 <= token < self.engine.vocab_size:
                raise wrong(f"{field}[{place}]", token, f"no such token; ids are 0 to {self.engine.vocab_size - 1}")

    def check_count(self, num_requests: int, field: str) -> None:
        if num_requests > self.engine.max_queue:
            raise ApiError(
                f"{field}: {num_requests} responses are more than the queue can hold ({self.engine.max_queue}); "
                "request fewer, or start the server with a larger engine.max_queue",
                param=field,
            )

    @staticmethod
    def _not_empty(tokens: tuple[int, ...], field: str) -> tuple[int, ...]:
        if not tokens:
            raise ApiError(f"{field}: is empty; give at least one token", param=field)
        return tokens
