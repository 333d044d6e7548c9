"""Requests and answers of SGLang's ``/generate``, what a server says about itself, and what differs between versions.

The link is in ``http.py``. A ``headwater serve`` answers like the newest version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.backends.remote.http import refusal
from headwater.backends.remote.link import (
    STREAM_INTERVAL,
    Garbage,
    LinkLost,
    Sending,
    ServerInfo,
    StreamedTokens,
    read_spans,
)
from headwater.backends.remote.media import data_url
from headwater.core.errors import LogitsBroken, RequestError, RolloutFailed
from headwater.core.requests import StopReason, derive_key

_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NO_FEATURES = {"SGLANG_VLM_CACHE_SIZE_MB": "0", "SGLANG_EXPOSE_OWN_ENV_VARS": "1"}
"""SGLang keeps what the vision tower has made of an image under the image's hash alone, and no call empties that cache:
after an update, images that were seen before would have the features of older weights. The first variable turns the
cache off. The second makes ``/server_info`` tell the first."""
_NUM_CHARACTERS_SHOWN = 200


@dataclass(frozen=True)
class SglangDialect:
    """How to talk to one range of versions."""

    since: tuple[int, int, int]
    """The first version."""
    labels_tokens: bool
    """``meta_info.weight_versions`` says which weights produced which tokens."""
    has_pause_modes: bool
    """``/pause_generation`` takes a mode. Otherwise it always ends the running requests with the tokens they have."""
    has_seeds: bool
    """``sampling_seed`` is a known sampling parameter. It has an effect with ``--enable-deterministic-inference``."""
    info_prefix: str = "/"
    """What comes before ``server_info`` and ``model_info`` in the paths of these calls."""
    has_update_calls: bool = False
    """Tensors are taken from a process group only between ``/begin_weight_update`` and ``/end_weight_update``."""
    streams_new_tokens: bool = False
    """With ``--incremental-streaming-output``, an event has the log-probs of its new tokens only. In versions before,
    whose option is ``--stream-output`` or the same, it repeats the log-probs of the whole response."""


DIALECTS = (
    SglangDialect(
        (0, 5, 21),
        labels_tokens=True,
        has_pause_modes=True,
        has_seeds=True,
        has_update_calls=True,
        streams_new_tokens=True,
    ),
    SglangDialect((0, 5, 19), labels_tokens=True, has_pause_modes=True, has_seeds=True, streams_new_tokens=True),
    SglangDialect((0, 5, 11), labels_tokens=False, has_pause_modes=True, has_seeds=True, streams_new_tokens=True),
    SglangDialect((0, 5, 6), labels_tokens=False, has_pause_modes=True, has_seeds=True),
    SglangDialect((0, 5, 3), labels_tokens=False, has_pause_modes=False, has_seeds=True, info_prefix="/get_"),
    SglangDialect((0, 5, 1), labels_tokens=False, has_pause_modes=False, has_seeds=False, info_prefix="/get_"),
)
"""The newest first. A version between two rows speaks the older of the two. Compared with the packages of all versions
from 0.5.1 to 0.5.23."""

OLDEST = DIALECTS[-1]
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def dialect_of(version: str) -> SglangDialect:
    """The row of the table for a version such as ``0.5.6.post2``."""
    found = _VERSION.match(version)
    number = tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    for dialect in DIALECTS:
        if number >= dialect.since:
            return dialect
    oldest = ".".join(map(str, OLDEST.since))
    raise RolloutFailed(f"SGLang {version} is not supported; install SGLang {oldest} or newer for the server")


def read_info(told: Mapping[str, Any], model: Mapping[str, Any], dialect: SglangDialect) -> ServerInfo:
    """From ``/server_info`` and ``/model_info``."""
    can: Mapping[str, Any] = told.get("capabilities") or {}
    # Older versions tell only the seed that a process has chosen. The label of its weights differs, too.
    instance = told.get("instance") or f"{told.get('startup_time', '')}-{told.get('random_seed', '')}"
    vocab_size = told.get("vocab_size")
    # In older versions, model_path becomes the folder of the weights that the server was given last, in both answers.
    started_with = told["model_path"] if "launch_command" in told else model.get("tokenizer_path")
    return ServerInfo(
        version=str(told["version"]),
        model=str(started_with or model["model_path"]),
        dtype=str(can.get("dtype") or told.get("dtype") or "auto"),
        instance=str(instance),
        max_model_tokens=int(told.get("context_length") or told.get("max_req_input_len") or 0),
        max_sequences=int(told.get("max_running_requests") or told.get("max_sequences") or 0),
        device=str(told.get("device") or ""),
        # A server that prepares a step during the one before counts a token of the old weights as one of the new.
        labels_tokens=dialect.labels_tokens and ("instance" in told or bool(told.get("disable_overlap_schedule"))),
        can_sleep=bool(told.get("enable_memory_saver") or can.get("memory_tags")),
        label=str(model.get("weight_version") or ""),
        num_workers=int(told.get("tp_size") or 1),
        vocab_size=None if vocab_size is None else int(vocab_size),
        # Older versions do not tell. All take images if their model does.
        takes_media=bool(can.get("media", model.get("has_image_understanding", True))),
        published_names="instance" not in told,
        keeps_features="instance" not in told and not _keeps_no_features(told),
    )


def _keeps_no_features(told: Mapping[str, Any]) -> bool:
    """Whether every process of the server tells that it was started as ``NO_FEATURES`` says."""
    states = told.get("internal_states") or [{}]
    return all((each.get("env_vars") or {}).get("SGLANG_VLM_CACHE_SIZE_MB") == "0" for each in states)


def write_request(sending: Sending, dialect: SglangDialect, *, streams_new_tokens: bool = False) -> dict[str, Any]:
    """The body of ``/generate``. Stop strings are not sent: the session looks for them."""
    request = sending.request
    sampling, num_given = request.sampling, len(request.given_tokens)
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens - num_given,
        "min_new_tokens": max(0, sampling.min_new_tokens - num_given),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop_token_ids": [*(() if sampling.ignore_end else sending.end_tokens), *sampling.stop_token_ids],
        "ignore_eos": sampling.ignore_end,
        "skip_special_tokens": False,
    }
    if dialect.has_seeds:
        # A continued response must not draw the same random numbers again.
        params["sampling_seed"] = derive_key(request.rng_key, num_given) & (2**31 - 1)
    if streams_new_tokens:
        params["stream_interval"] = STREAM_INTERVAL
    # Without updates in flight, every update empties the cache.
    key = {"extra_key": sending.cache_key} if dialect.labels_tokens else {}
    return {
        **key,
        **({"image_data": list(map(data_url, sending.prompt.images))} if request.media else {}),
        "rid": request_name(request.request_id),
        "input_ids": sending.tokens,
        "sampling_params": params,
        "return_logprob": True,
        "stream": sending.streams or streams_new_tokens,
    }


def request_name(request_id: str) -> str:
    """SGLang aborts every request whose name begins with the given one, so no name may be the beginning of another."""
    return f"{request_id};"


def read_answer(text: str, num_read: int | None = None) -> StreamedTokens:
    """An answer of ``/generate``, or an event of its stream after ``num_read`` tokens.

    The tokens are taken from their log-probs, which every version returns.
    """
    try:
        answer = json.loads(text)
        if "error" in answer:
            raise RequestError(f"SGLang refuses a request: {_shown(answer['error'])}")
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        ended = meta["finish_reason"]
        if ended is not None and ended["type"] not in _STOP_REASONS:
            raise Garbage(f"the finish reason {ended['type']!r}")
        if ended is not None and int(ended.get("status_code") or 0) >= 400:  # outside a stream, it is the answer's
            raise refusal("POST /generate", int(ended["status_code"]), str(ended.get("message")))
        if num_read is not None:
            entries = _new_entries(entries, int(meta["completion_tokens"]) - num_read, ended)
        pairs = [(float(entry[0]), int(entry[1])) for entry in entries]
        num_prompt = meta.get("prompt_tokens")
        spans, label = read_spans(meta.get("weight_versions")), str(meta.get("weight_version") or "")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Garbage(f"{type(error).__name__}: {error}; the answer: {_shown(text)}") from error
    for logprob, token in pairs:
        if not logprob <= 0.01:  # also for NaN
            raise LogitsBroken(f"SGLang reports the log-prob {logprob} for token {token}: its logits are not numbers")
    tokens, logprobs = tuple(token for _, token in pairs), tuple(min(each, 0.0) for each, _ in pairs)
    reason = None if ended is None else _STOP_REASONS[ended["type"]]
    return StreamedTokens(tokens, logprobs, reason, spans, label, num_prompt=num_prompt)


def _new_entries(entries: list[Any], num_new: int, ended: Any) -> list[Any]:
    """The log-probs of an event's new tokens.

    They are the last ones, whether the event has the whole response, only what is new, or both, which happens if a
    request is aborted after it was moved back into SGLang's queue.
    """
    if num_new <= len(entries):
        return entries[len(entries) - max(0, num_new) :]
    if ended is not None and ended["type"] == "abort":
        return []  # older versions tell no log-probs then
    raise LinkLost(f"{num_new - len(entries)} tokens of a stream are missing")


def _shown(value: Any) -> str:
    return str(value)[:_NUM_CHARACTERS_SHOWN]
