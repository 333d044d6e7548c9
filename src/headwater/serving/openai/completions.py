"""``POST /v1/completions``: reading the body and formatting the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.core.protocols import Tokenizer
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, is_integer
from headwater.serving.openai.plan import (
    Plan,
    SamplingFields,
    check_model,
    fingerprint,
    head,
    read_shape,
    refuse_unsupported,
    usage,
)
from headwater.serving.output import Piece, token_text
from headwater.serving.prompt import ModelLimits

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def read_completion(body: Mapping[str, Any], limits: ModelLimits, served_name: str) -> Plan:
    fields = Fields(body)
    model = check_model(fields, served_name)
    sampling = SamplingFields.read(fields, limits)
    max_tokens = fields.optional_integer("max_tokens", minimum=1)
    shape = read_shape(fields, sampling.stops, logprobs=_logprobs(fields))
    prompt = fields.raw("prompt")
    fields.neutral("echo", [False], "only sampled tokens have log-probs; prepend the prompt in the client")
    fields.neutral("suffix", [""], "the model only continues text")
    fields.neutral("best_of", [1, sampling.num_samples], "request n samples and choose among them")
    refuse_unsupported(fields)
    fields.done()
    prompts = _prompts(prompt, limits)
    limits.check_count(len(prompts) * sampling.num_samples, "n")
    num_new_tokens = [
        limits.num_new_tokens(
            len(tokens),
            max_tokens,
            DEFAULT_MAX_TOKENS,
            "max_tokens",
            prompt_field="prompt" if len(prompts) == 1 else f"prompt[{place}]",
        )
        for place, tokens in enumerate(prompts)
    ]
    return Plan.build(
        "cmpl",
        model,
        [(tokens, sampling.params(num_new)) for tokens, num_new in zip(prompts, num_new_tokens, strict=True)],
        num_samples=sampling.num_samples,
        seed=sampling.seed,
        shape=shape,
    )


def _prompts(prompt: Any, limits: ModelLimits) -> list[tuple[int, ...]]:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if prompt is None:
        raise ApiError("prompt: is missing; give a text, token ids, or a list of either", param="prompt")
    if isinstance(prompt, str):
        return [limits.tokens_of_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise wrong("prompt", prompt, "must be a text, token ids, or a list of either")
    if not prompt:
        raise ApiError("prompt: is an empty list; give at least one prompt", param="prompt")
    if is_integer(prompt[0]):
        return [limits.tokens_of_ids(prompt, "prompt")]
    limits.check_count(len(prompt), "prompt")
    return [
        (limits.tokens_of_text if isinstance(each, str) else limits.tokens_of_ids)(each, f"prompt[{place}]")
        for place, each in enumerate(prompt)
    ]


def _logprobs(fields: Fields) -> bool:
    count = fields.optional_integer("logprobs", minimum=0)
    if count is not None and count > 1:
        raise wrong("logprobs", count, "only the log-prob of the sampled token is available; use 1")
    return count is not None


class CompletionReply:
    """Formats the pieces of a plan as OpenAI does, complete or in chunks."""

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
