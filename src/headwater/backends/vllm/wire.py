"""Requests and answers of vLLM's token interface (``/inference/v1/generate``), and what differs between versions.

The body of a request is the same over HTTP and in this process. An answer is a stream of ``StreamedTokens``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwater.backends.remote.link import STREAM_INTERVAL, Garbage, LinkLost, Sending, StreamedTokens, read_spans
from headwater.backends.remote.media import data_url
from headwater.core.errors import LogitsBroken, RequestError, RolloutFailed
from headwater.core.requests import StopReason, derive_key

ADAPTERS = "headwater-adapters"
"""The name under which a server knows the adapters of a run."""
NO_LOGPROB = -9999.0
"""vLLM's value for a log-prob that is not a number, or that it did not compute."""
_NUM_CHARACTERS_SHOWN = 200
_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True)
class VllmDialect:
    """How to talk to one range of versions."""

    since: tuple[int, int]
    """The first version."""
    has_integer_logprobs: bool
    """Log-probs name their token by ``token_id``. Otherwise by ``token``, as ``token_id:17``."""
    labels_tokens: bool
    """Every response says which label of weights produced which tokens, so that it may span an update."""
    batches_stream: bool
    """A request may say how many tokens a chunk of its stream has."""
    releases_cache_alone: bool
    """``/release_kv_cache_memory`` frees the KV cache and leaves the weights where they are."""
    takes_images: bool
    """Images are sent with the tokens, as ``content_parts``, and the answer contains the expanded prompt."""
    computes_adapters: bool
    """LoRA adapters can be replaced while requests wait, also after all weights were reloaded below them."""


DIALECTS = (
    VllmDialect(
        (0, 32),
        has_integer_logprobs=True,
        labels_tokens=True,
        batches_stream=True,
        releases_cache_alone=True,
        takes_images=True,
        computes_adapters=True,
    ),
    VllmDialect(
        (0, 23),
        has_integer_logprobs=False,
        labels_tokens=False,
        batches_stream=False,
        releases_cache_alone=False,
        takes_images=False,
        computes_adapters=False,
    ),
)
"""The newest first. A version between two rows speaks the older of the two."""

_VERSION = re.compile(r"(\d+)\.(\d+)")


def dialect_of(version: str) -> VllmDialect:
    """The row of the table for a version such as ``0.32.0+cpu``."""
    found = _VERSION.match(version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    for dialect in DIALECTS:
        if number >= dialect.since:
            return dialect
    oldest = ".".join(map(str, DIALECTS[-1].since))
    raise RolloutFailed(f"vLLM {version} is not supported; install vLLM {oldest} or newer for the server")


def write_request(sending: Sending, dialect: VllmDialect) -> dict[str, Any]:
    """The body that asks for the tokens after ``request.given_tokens``.

    Stop strings are not sent: the session looks for them, so that they are found where other backends find them, also
    across the place where a response was interrupted.
    """
    request = sending.request
    sampling, num_given = request.sampling, len(request.given_tokens)
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens - num_given,
        "min_tokens": max(0, sampling.min_new_tokens - num_given),
        "stop_token_ids": [*(() if sampling.ignore_end else sending.end_tokens), *sampling.stop_token_ids],
        "ignore_eos": sampling.ignore_end,
        # A continued response must not draw the same random numbers again.
        "seed": derive_key(request.rng_key, num_given) & (2**63 - 1),
        "logprobs": 0,
        "detokenize": False,
    }
    if dialect.batches_stream:
        params["stream_interval"] = STREAM_INTERVAL
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): value for token, value in sampling.logit_bias}
    named = {"model": ADAPTERS} if sending.has_adapters else {}
    media = {}
    if request.media:
        parts = [
            {"type": "image_url", "url": data_url(image), "uuid": item.content.digest}
            for item, image in zip(request.media, sending.prompt.images, strict=True)
        ]
        media = {"content_parts": parts, "return_token_ids": True}
    return {
        **named,
        **media,
        "request_id": request.request_id,
        "token_ids": sending.tokens,
        "sampling_params": params,
        "stream": True,
        "cache_salt": sending.cache_key,
    }


def read_event(data: str, dialect: VllmDialect) -> StreamedTokens | None:
    """One event of the stream; ``None`` for events without tokens or an end."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise _failure(event["error"])
        choices, prompt = event["choices"], event.get("prompt_token_ids")
        chunk = read_choice(choices[0], dialect) if choices else None
        return chunk if prompt is None or chunk is None else replace(chunk, prompt=tuple(prompt))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Garbage(f"{type(error).__name__}: {error}; the event: {_shown(data)}") from error


def read_choice(choice: Mapping[str, Any], dialect: VllmDialect) -> StreamedTokens:
    tokens = tuple(int(token) for token in choice.get("token_ids") or ())
    entries = ((choice.get("logprobs") or {}).get("content") or ()) if tokens else ()
    if len(entries) != len(tokens):
        raise Garbage(f"{len(entries)} log-probs for {len(tokens)} tokens: {_shown(choice)}")
    logprobs = []
    for token, entry in zip(tokens, entries, strict=True):
        named = entry["token_id"] if dialect.has_integer_logprobs else int(entry["token"].removeprefix("token_id:"))
        if named != token:
            raise Garbage(f"the log-prob of token {named} for token {token}")
        logprob = float(entry["logprob"])
        if not NO_LOGPROB < logprob <= 0.01:
            raise LogitsBroken(
                f"vLLM reports the log-prob {logprob} for token {token}: its logits are not numbers, or it was started "
                "with a --logprobs-mode that reports logits"
            )
        logprobs.append(min(logprob, 0.0))
    ended = choice.get("finish_reason")
    if ended is not None and ended not in _STOP_REASONS:
        raise Garbage(f"the finish reason {ended!r}: {_shown(choice)}")
    spans = read_spans(choice.get("weight_versions"))
    return StreamedTokens(tokens, tuple(logprobs), None if ended is None else _STOP_REASONS[ended], spans)


def _failure(error: Mapping[str, Any]) -> Exception:
    """What vLLM reports in a stream, whose status is always 200."""
    if 400 <= int(error["code"]) < 500:
        return RequestError(f"vLLM refuses a request: {_shown(error['message'])}")
    # Its engine has failed, and the server ends.
    return LinkLost(f"vLLM reports an error instead of tokens: {_shown(error['message'])}")


def _shown(value: Any) -> str:
    return str(value)[:_NUM_CHARACTERS_SHOWN]
