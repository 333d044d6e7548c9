"""``POST /v1/completions``: reading the body and formatting the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.core.protocols import Tokenizer
from headwater.core.requests import MAX_TOP_LOGPROBS, Alternatives
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, is_integer
from headwater.serving.openai.plan import (
    CallPlan,
    SamplingFields,
    check_model,
    fingerprint,
    head,
    read_shape,
    refuse_unsupported,
    usage,
)
from headwater.serving.options import ServerOptions
from headwater.serving.output import Offsets, OutputPiece, token_text
from headwater.serving.prompt import ModelLimits

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
LEAST_LOGPROB = -9999.0
"""Sent instead of minus infinity, for a prompt token that the model considers impossible."""


def read_completion(body: Mapping[str, Any], limits: ModelLimits, options: ServerOptions) -> CallPlan:
    fields = Fields(body)
    model = check_model(fields, options)
    sampling = SamplingFields.read(fields, limits)
    echo = fields.flag("echo", False)
    max_tokens = fields.optional_integer("max_tokens", minimum=0)
    if max_tokens == 0 and not echo:
        raise wrong("max_tokens", max_tokens, "must be >= 1, or 0 with echo = true to score the prompt")
    num_top = fields.optional_integer("logprobs", minimum=0, maximum=MAX_TOP_LOGPROBS)
    shape = read_shape(fields, sampling.stops, logprobs=num_top is not None, echo=echo)
    prompt = fields.raw("prompt")
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
    params = [
        sampling.params(
            num_new,
            num_top_logprobs=num_top or 0,
            prompt_logprobs=echo and (num_top is not None or num_new == 0),
        )
        for num_new in num_new_tokens
    ]
    return CallPlan.build(
        "cmpl",
        model,
        list(zip(prompts, params, strict=True)),
        num_samples=sampling.num_samples,
        seed=sampling.seed,
        shape=shape,
        session=sampling.session,
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


class CompletionReply:
    """Formats the pieces of a plan as OpenAI does, complete or in chunks."""

    def __init__(self, plan: CallPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def whole(self, pieces: Sequence[OutputPiece], version: int) -> dict[str, Any]:
        return {
            **head(self._plan, KIND),
            "system_fingerprint": fingerprint(version),
            "choices": [self._choice(place, piece, first=True) for place, piece in enumerate(pieces)],
            "usage": usage(self._plan, sum(len(piece.tokens) for piece in pieces)),
        }

    def chunks(self, place: int, piece: OutputPiece, version: int) -> list[dict[str, Any]]:
        shape = self._plan.shape
        first = place not in self._begun
        self._begun.add(place)
        shows = piece.text or piece.stop_reason or (piece.tokens and (shape.logprobs or shape.token_ids))
        if not shows and not (first and (shape.token_ids or shape.echo)):
            return []
        return [self._chunk([self._choice(place, piece, first=first)], version)]

    def last_chunk(self, num_completion_tokens: int, version: int) -> dict[str, Any]:
        return {**self._chunk([], version), "usage": usage(self._plan, num_completion_tokens)}

    def _chunk(self, choices: list[dict[str, Any]], version: int) -> dict[str, Any]:
        chunk = {**head(self._plan, KIND), "system_fingerprint": fingerprint(version), "choices": choices}
        if self._plan.shape.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, place: int, piece: OutputPiece, *, first: bool) -> dict[str, Any]:
        shape = self._plan.shape
        prompt = self._prompt(place) if shape.echo else ""
        choice: dict[str, Any] = {
            "index": place,
            "text": prompt + piece.text if first else piece.text,
            "logprobs": self._logprobs(place, piece, len(prompt), first=first) if shape.logprobs else None,
            "finish_reason": piece.stop_reason,
        }
        if shape.token_ids:
            if first:
                choice["prompt_token_ids"] = self._plan.requests[place].input_tokens
            choice["token_ids"] = piece.tokens
        return choice

    def _prompt(self, place: int) -> str:
        tokens, skip = self._plan.requests[place].input_tokens, self._plan.shape.rules.skip_special_tokens
        return self._tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    def _logprobs(self, place: int, piece: OutputPiece, num_prompt_characters: int, *, first: bool) -> dict[str, Any]:
        request, shape = self._plan.requests[place], self._plan.shape
        tokens, offsets = piece.tokens, tuple(num_prompt_characters + offset for offset in piece.offsets)
        logprobs: tuple[float | None, ...] = piece.logprobs
        tops: tuple[Alternatives | None, ...] = piece.top_logprobs
        if first and shape.echo and piece.prompt_scores is not None:
            starts = Offsets(self._tokenizer, shape.rules.skip_special_tokens)
            offsets = (*map(starts.next, request.input_tokens), *offsets)
            tokens = (*request.input_tokens, *tokens)
            # Nothing precedes the first token. JSON has no infinity.
            scores = (max(each, LEAST_LOGPROB) for each in piece.prompt_scores.logprobs)
            logprobs, tops = (None, *scores, *logprobs), (None, *piece.prompt_scores.top_logprobs, *tops)
        return {
            "tokens": [token_text(self._tokenizer, token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": self._tops(tokens, logprobs, tops) if request.sampling.num_top_logprobs else None,
            "text_offset": offsets,
        }

    def _tops(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Alternatives | None],
    ) -> list[dict[str, float] | None]:
        """The alternatives and the token itself, by their texts. Of tokens with the same text, the most likely one."""
        named: list[dict[str, float] | None] = []
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
            if top is None or logprob is None:
                named.append(None)
                continue
            by_text: dict[str, float] = {}
            for each, its_logprob in (*top, (token, logprob)):
                by_text.setdefault(token_text(self._tokenizer, each), logprob if each == token else its_logprob)
            named.append(by_text)
        return named
