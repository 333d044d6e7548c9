"""Prompts as tokens, checked against the engine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.core.media import MediaProcessor
from headwater.core.protocols import EngineLimits, Tokenizer
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import checked_integers, checked_text
from headwater.serving.options import DEFAULT_MAX_RESPONSES
from headwater.serving.reading import check_client

MAX_CHARACTERS_PER_TOKEN = 64
"""A text with more characters per token of the longest prompt is refused unread. Only long runs of spaces reach it."""
MAX_STOP_TOKEN_IDS = 1024
_SLICE_CHARACTERS = 2**15


@dataclass(frozen=True)
class ModelLimits:
    """Turns prompts into tokens and checks requests against the engine's limits, with the client's field names."""

    tokenizer: Tokenizer
    engine: EngineLimits
    max_responses: int = DEFAULT_MAX_RESPONSES
    """The largest number of responses that one request may ask for."""
    processor: MediaProcessor | None = None
    """Makes tokens of images and videos; None if the model or its engine takes only text."""
    fetches_media: bool = False
    """Whether the server downloads images from addresses that clients name."""

    def tokens_of_text(self, text: Any, field: str) -> tuple[int, ...]:
        tokens = tuple(self.tokenizer.encode(self.short_text(text, field)))
        return self._not_empty(tokens, field)

    def short_text(self, text: Any, field: str) -> str:
        """``text``, if it may fit the model. Tokenising it then takes about as long as for the longest prompt.

        A text that is certainly too long is refused before it is tokenised as a whole, which would take minutes and
        gigabytes for megabytes of text.
        """
        checked, most = checked_text(text, field), self.engine.max_model_tokens
        check_client()
        if len(checked) > MAX_CHARACTERS_PER_TOKEN * most:
            raise self._too_long(f"{len(checked)} characters", field)
        if len(checked) > max(_SLICE_CHARACTERS, 4 * most):
            self._check_slices(checked, field)
        return checked

    def check_messages(self, messages: Sequence[Any], field: str) -> None:
        """Refuse a chat before it is rendered, if every message had one token and it would still be too long."""
        if len(messages) > self.engine.max_model_tokens:
            raise self._too_long(f"{len(messages)} messages", field)

    def _check_slices(self, text: str, field: str) -> None:
        """Count the tokens slice by slice. A cut inside a word adds a few tokens, so allow for twice as many."""
        num_tokens = 0
        for start in range(0, len(text), _SLICE_CHARACTERS):
            check_client()
            part = text[start : start + _SLICE_CHARACTERS]
            num_tokens += len(self.tokenizer.encode(part, add_special_tokens=False))
            if num_tokens > 2 * self.engine.max_model_tokens:
                raise self._too_long(f"more than {self.engine.max_model_tokens} tokens", field)

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
            raise self._too_long(f"{num_prompt} tokens", prompt_field)
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

    def check_ids(self, ids: Sequence[int], field: str, *, most: int = MAX_STOP_TOKEN_IDS) -> None:
        if len(ids) > most:
            raise ApiError(f"{field}: contains {len(ids)} token ids, and the limit is {most}; use fewer", param=field)
        for place, token in enumerate(ids):
            if not 0 <= token < self.engine.vocab_size:
                raise wrong(f"{field}[{place}]", token, f"no such token; ids are 0 to {self.engine.vocab_size - 1}")

    def check_count(self, num_requests: int, field: str) -> None:
        if num_requests > self.max_responses:
            raise ApiError(
                f"{field}: {num_requests} responses are more than one request may ask for ({self.max_responses}); "
                "send several requests, or start the server with a larger --max-responses",
                param=field,
            )
        if num_requests > self.engine.max_queue:
            raise ApiError(
                f"{field}: {num_requests} responses are more than the queue can hold ({self.engine.max_queue}); "
                "request fewer, or start the server with a larger engine.max_queue",
                param=field,
            )

    def _too_long(self, size: str, field: str) -> ApiError:
        most = f"{self.engine.max_model_tokens}{'' if size.endswith('tokens') else ' tokens'}"
        return ApiError(
            f"{field}: the prompt has {size}, and the model supports {most} including the response; shorten the prompt",
            param=field,
            code="context_length_exceeded",
        )

    @staticmethod
    def _not_empty(tokens: tuple[int, ...], field: str) -> tuple[int, ...]:
        if not tokens:
            raise ApiError(f"{field}: is empty; give at least one token", param=field)
        return tokens
