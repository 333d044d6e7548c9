"""``ModelRequest`` and ``Delta`` as JSON. A request that one side writes is read as an equal request by the other."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headwater.core.requests import GRAMMAR_KINDS, Delta, Grammar, ModelRequest, SamplingParams
from headwater.data.media import MediaCache
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, check_name, checked_integers
from headwater.serving.native.media import read_media, write_media
from headwater.serving.prompt import ModelLimits
from headwater.serving.sampling import read_stops


def write_request(request: ModelRequest, known_media: set[str] | None = None) -> dict[str, Any]:
    """``known_media`` are the digests of the contents that the server has (``media.write_media``)."""
    written = {
        "request_id": request.request_id,
        "input_tokens": request.input_tokens,
        "given_tokens": request.given_tokens,
        "sampling": asdict(request.sampling),
        "rng_key": request.rng_key,
        "session": request.session,
    }
    return {**written, "media": write_media(request.media, known_media)} if request.media else written


def read_request(body: Mapping[str, Any], limits: ModelLimits, store: MediaCache | None = None) -> ModelRequest:
    """``store`` has the contents that the server has seen; None if its engine takes only text."""
    fields = Fields(body)
    request_id = fields.text("request_id") or secrets.token_hex(8)
    check_name(request_id, "request_id")
    input_tokens = limits.tokens_of_ids(fields.raw("input_tokens"), "input_tokens")
    given_tokens = fields.integers("given_tokens")
    limits.check_ids(given_tokens, "given_tokens", most=limits.engine.max_model_tokens)
    sampling = fields.mapping("sampling")
    rng_key = fields.optional_integer("rng_key", minimum=-(2**63), maximum=2**63 - 1)
    session = fields.text("session") or ""
    media = read_media(fields.raw("media"), len(input_tokens), store)
    fields.done()
    if sampling is None:
        raise ApiError('sampling: is missing; give at least {"max_new_tokens": 16}', param="sampling")
    if rng_key is None:
        raise ApiError("rng_key: is missing; give the number that decides every sampled token", param="rng_key")
    params = _read_sampling(sampling, limits)
    return ModelRequest(request_id, input_tokens, params, rng_key, given_tokens, session, media)


def check_length(request: ModelRequest, limits: ModelLimits) -> None:
    """Check the length as the engine will, but with the client's field names."""
    limits.num_new_tokens(
        len(request.input_tokens),
        request.sampling.max_new_tokens,
        None,
        "sampling.max_new_tokens",
        prompt_field="input_tokens",
    )


def _read_sampling(values: Mapping[str, Any], limits: ModelLimits) -> SamplingParams:
    fields = Fields(values, "sampling")
    max_new_tokens = fields.optional_integer("max_new_tokens")
    if max_new_tokens is None:
        raise ApiError(
            "sampling.max_new_tokens: is missing; give the largest length of the response, for example 16",
            param="sampling.max_new_tokens",
        )
    read: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": fields.number("temperature", 1.0),
        "top_k": fields.integer("top_k", 0),
        "top_p": fields.number("top_p", 1.0),
        "min_p": fields.number("min_p", 0.0),
        "min_new_tokens": fields.integer("min_new_tokens", 0),
        "stop_token_ids": fields.integers("stop_token_ids"),
        "stop_strings": read_stops(fields, "stop_strings"),
        "ignore_end": fields.flag("ignore_end", False),
        "logit_bias": _read_bias(fields, limits),
        "presence_penalty": fields.number("presence_penalty", 0.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0),
        "repetition_penalty": fields.number("repetition_penalty", 1.0),
        "grammar": _read_grammar(fields),
    }
    fields.neutral("num_top_logprobs", [0], "this call returns the sampled tokens; use /v1/completions")
    fields.neutral("prompt_logprobs", [False], "this call returns the sampled tokens; use /v1/completions")
    fields.done()
    limits.check_ids(read["stop_token_ids"], fields.name("stop_token_ids"))
    try:
        return SamplingParams(**read)
    except ValueError as error:  # the record checks its own values
        raise ApiError(f"sampling.{error}", param="sampling") from error


def _read_bias(fields: Fields, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    """A list of pairs of a token and a number."""
    pairs, name = fields.raw("logit_bias") or [], fields.name("logit_bias")
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ApiError(f"{name}: must be a list of [token, number]", param=name)
    for place, (_, bias) in enumerate(pairs):
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise wrong(f"{name}[{place}][1]", bias, "must be a number")
    tokens = checked_integers([token for token, _ in pairs], name)
    limits.check_ids(tokens, name)
    return tuple((token, float(bias)) for token, (_, bias) in zip(tokens, pairs, strict=True))


def _read_grammar(fields: Fields) -> Grammar | None:
    values = fields.mapping("grammar")
    if values is None:
        return None
    parts = Fields(values, fields.name("grammar"))
    kind, text = parts.choice("kind", GRAMMAR_KINDS), parts.text("text")
    parts.done()
    if kind is None or text is None:
        raise ApiError(f"{fields.name('grammar')}: needs kind and text", param=fields.name("grammar"))
    return Grammar(kind, text)


def line_of(delta: Delta) -> dict[str, Any]:
    """New tokens of a response. Log-probs keep every bit, because Python's float format is exact."""
    line: dict[str, Any] = {"tokens": delta.tokens, "logprobs": delta.logprobs, "versions": delta.versions}
    return line if delta.stop_reason is None else {**line, "stop_reason": delta.stop_reason}
