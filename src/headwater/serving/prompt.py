"""Prompts as tokens, checked against the model, and the room they leave for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.core.protocols import Tokenizer
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import checked_integers, checked_text


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_tokens: int
    max_request_tokens: int
    """At most that, and less where the whole KV cache holds less than the model takes."""
    max_queue: int

    def tokens_of_text(self, text: Any, field: str) -> tuple[int, ...]:
        tokens = tuple(self.tokenizer.encode(checked_text(text, field)))
        return self._not_empty(tokens, field)

    def tokens_of_ids(self, ids: Any, field: str) -> tuple[int, ...]:
        if not isinstance(ids, list):
            raise wrong(field, ids, "must be a list of token ids")
        tokens = checked_integers(ids, field)
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            place = next(place for place, token in enumerate(tokens) if not 0 <= token < self.vocab_size)
            raise wrong(f"{field}[{place}]", tokens[place], f"no such token; ids are 0 to {self.vocab_size - 1}")
        return self._not_empty(tokens, field)

    def num_new_tokens(
        self, num_prompt: int, asked: int | None, default: int | None, field: str, *, prompt_field: str
    ) -> int:
        """``asked``, if the model takes it behind the prompt; else ``default`` or all the room there is."""
        room = self.max_model_tokens - num_prompt
        if room < 1:
            raise ApiError(
                f"{prompt_field}: the prompt has {num_prompt} tokens, and the model takes {self.max_model_tokens} with "
                "the answer; shorten the prompt",
                param=prompt_field,
                code="context_length_exceeded",
            )
        if asked is None:
            # Nobody asked for more than the cache holds. Where not one token fits, the engine says what it needs.
            room = max(1, self.max_request_tokens - num_prompt)
            return room if default is None else min(room, default)
        if asked > room:
            raise wrong(
                field,
                asked,
                f"the prompt has {num_prompt} tokens and the model takes {self.max_model_tokens} in all; "
                f"use at most {room}, or shorten the prompt",
                code="context_length_exceeded",
            )
        return asked

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        for place, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise wrong(f"{field}[{place}]", token, f"no such token; ids are 0 to {self.vocab_size - 1}")

    def check_count(self, num_requests: int, field: str) -> None:
        if num_requests > self.max_queue:
            raise ApiError(
                f"{field}: {num_requests} responses at once are more than the queue holds ({self.max_queue}); "
                "ask for fewer, or start the server with a larger engine.max_queue",
                param=field,
            )

    @staticmethod
    def _not_empty(tokens: tuple[int, ...], field: str) -> tuple[int, ...]:
        if not tokens:
            raise ApiError(f"{field}: is empty; give at least one token to go on from", param=field)
        return tokens
