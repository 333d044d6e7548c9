"""``POST /generate``: what a body asks for."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.core.records import ModelRequest
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, checked_text, is_integer
from headwater.serving.prompt import ModelLimits
from headwater.serving.randomness import sample_keys
from headwater.serving.sglang.sampling import SamplingFields
from headwater.serving.text import TextRules

_ONLY_SAMPLED = "only the sampled tokens' log-probs are known"
_ONLY_TEXT = "this server takes text or token ids"
_ONE_MODEL = "the server has one model, without adapters"
_ONE_SERVER = "this server is not part of a distributed deployment"
_NOT_KEPT = "the engine keeps only tokens and log-probs"

_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("logprob_start_len", (-1,), _ONLY_SAMPLED),
    ("top_logprobs_num", (0,), _ONLY_SAMPLED),
    ("token_ids_logprob", ([],), _ONLY_SAMPLED),
    ("return_sampling_mask", (False,), _ONLY_SAMPLED),
    ("return_flat_raw_top_logprobs", (False,), _ONLY_SAMPLED),
    ("return_flat_raw_top_logprobs_b64", (False,), _ONLY_SAMPLED),
    ("return_entropy", (False,), _ONLY_SAMPLED),
    ("input_embeds", ([],), _ONLY_TEXT),
    ("positional_embed_overrides", ([],), _ONLY_TEXT),
    ("image_data", ([], ""), _ONLY_TEXT),
    ("video_data", ([], ""), _ONLY_TEXT),
    ("audio_data", ([], ""), _ONLY_TEXT),
    ("modalities", ([],), _ONLY_TEXT),
    ("mm_hashes", ([],), _ONLY_TEXT),
    ("session_params", ({},), "requests are independent; send the whole prompt"),
    ("lora_path", ("",), _ONE_MODEL),
    ("lora_id", ("",), _ONE_MODEL),
    ("custom_logit_processor", ("",), "tokens are sampled from the model's own distribution"),
    ("return_hidden_states", (False,), _NOT_KEPT),
    ("return_routed_experts", (False,), _NOT_KEPT),
    ("return_indexer_topk", (False,), _NOT_KEPT),
    ("return_prompt_token_ids", (False,), "send input_ids, then you know them"),
    ("return_bytes", (False,), _NOT_KEPT),
    ("bootstrap_host", ("",), _ONE_SERVER),
    ("bootstrap_port", (), _ONE_SERVER),
    ("bootstrap_room", (), _ONE_SERVER),
    ("routed_dp_rank", (0,), _ONE_SERVER),
    ("data_parallel_rank", (0,), _ONE_SERVER),
    ("disagg_prefill_dp_rank", (0,), _ONE_SERVER),
    ("background", (False,), "a request is answered where it was sent"),
    ("require_reasoning", (False,), "put it into the prompt"),
    ("max_thinking_tokens", (), "use sampling_params.max_new_tokens"),
    ("priority", (0,), "requests are served in the order they come"),
)
_LABELS = (
    "session_id",
    "log_metrics",
    "no_logs",
    "custom_labels",
    "conversation_id",
    "routing_key",
    "extra_key",
    "cache_salt",
    "external_trace_header",
    "received_time",
)


@dataclass(frozen=True)
class Sample:
    """One response to give: its request, and what its reply shows."""

    name: str
    """The reply's id: the client's ``rid``, numbered where it stands for several samples."""
    request: ModelRequest
    rules: TextRules
    logprobs: bool
    token_texts: bool


@dataclass(frozen=True)
class GenerateCall:
    samples: tuple[Sample, ...]
    """Those of the first prompt, then those of the second."""
    is_list: bool
    """Whether the reply is a list: several prompts, or several samples of one."""
    stream: bool
    names: Mapping[str, tuple[str, ...]]
    """For ``ActiveRequests``: what ``rid`` may name."""

    @property
    def requests(self) -> tuple[ModelRequest, ...]:
        return tuple(sample.request for sample in self.samples)


def read_generate(body: Mapping[str, Any], limits: ModelLimits) -> GenerateCall:
    fields = Fields(body)
    is_batch, prompts = _prompts(fields, limits)
    sampling = _per_prompt(fields, "sampling_params", len(prompts), {}, dict, "an object")
    logprobs = _per_prompt(fields, "return_logprob", len(prompts), False, bool, "true or false")
    token_texts = fields.flag("return_text_in_logprobs", False)
    stream = fields.flag("stream", False)
    rid = fields.raw("rid")
    for field, neutral, reason in _UNSUPPORTED:
        fields.neutral(field, neutral, reason)
    fields.ignored(*_LABELS)
    fields.done()

    prompts_field = "input_ids" if body.get("text") is None else "text"
    samples: list[Sample] = []
    names: dict[str, tuple[str, ...]] = {}
    for place, (rid_of_prompt, tokens) in enumerate(zip(_rids(rid, len(prompts), is_batch), prompts, strict=True)):
        prompt_field = f"{prompts_field}[{place}]" if is_batch else prompts_field
        read = SamplingFields.read(sampling[place], limits, num_prompt=len(tokens), prompt_field=prompt_field)
        limits.check_count(len(samples) + read.num_samples, "sampling_params.n")
        ids = tuple(_engine_id(rid_of_prompt) for _ in range(read.num_samples))
        names[rid_of_prompt] = ids
        for number, (request_id, key) in enumerate(zip(ids, sample_keys(read.seed, read.num_samples), strict=True)):
            name = rid_of_prompt if read.num_samples == 1 else f"{rid_of_prompt}_{number}"
            request = ModelRequest(request_id, tokens, read.params, key)
            samples.append(Sample(name, request, read.rules, logprobs[place], token_texts))
    if isinstance(rid, str) and is_batch:
        names[rid] = tuple(sample.request.request_id for sample in samples)
    return GenerateCall(tuple(samples), is_batch or len(samples) > 1, stream, names)


def _prompts(fields: Fields, limits: ModelLimits) -> tuple[bool, list[tuple[int, ...]]]:
    """Whether there are several, and their tokens."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (ids is None):
        given = "both are given" if text is not None else "neither is given"
        raise ApiError(f"text, input_ids: {given}; give exactly one of the two", param="text")
    if text is not None:
        if not isinstance(text, list):
            return False, [limits.tokens_of_text(text, "text")]
        _refuse_no_prompts(text, "text")
        limits.check_count(len(text), "text")
        return True, [limits.tokens_of_text(each, f"text[{place}]") for place, each in enumerate(text)]
    if not isinstance(ids, list):
        raise wrong("input_ids", ids, "must be a list of token ids, or a list of such lists")
    _refuse_no_prompts(ids, "input_ids")
    if is_integer(ids[0]):
        return False, [limits.tokens_of_ids(ids, "input_ids")]
    limits.check_count(len(ids), "input_ids")
    return True, [limits.tokens_of_ids(each, f"input_ids[{place}]") for place, each in enumerate(ids)]


def _refuse_no_prompts(values: list[Any], field: str) -> None:
    if not values:
        raise ApiError(f"{field}: is an empty list; give at least one prompt", param=field)


def _per_prompt(fields: Fields, field: str, num_prompts: int, default: Any, kind: type, rule: str) -> list[Any]:
    """One value for all prompts, or a list of one for each."""
    value = fields.raw(field)
    if value is None:
        return [default] * num_prompts
    values = value if isinstance(value, list) else [value] * num_prompts
    if len(values) != num_prompts:
        raise ApiError(
            f"{field}: a list of {len(values)} for {num_prompts} prompts; give one for each, or one for all",
            param=field,
        )
    for place, each in enumerate(values):
        if not isinstance(each, kind):
            name = f"{field}[{place}]" if isinstance(value, list) else field
            raise wrong(name, each, f"must be {rule}")
    return values


def _rids(rid: Any, num_prompts: int, is_batch: bool) -> list[str]:
    """The name of each prompt's request; one name for a batch is the beginning of all of theirs, as in SGLang."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(num_prompts)]
    if isinstance(rid, list):
        if len(rid) != num_prompts:
            raise ApiError(f"rid: a list of {len(rid)} for {num_prompts} prompts; give one for each", param="rid")
        names = [_name(each, f"rid[{place}]") for place, each in enumerate(rid)]
        if len(set(names)) != len(names):
            raise ApiError("rid: holds a name twice; give every prompt its own", param="rid")
        return names
    name = _name(rid, "rid")
    return [f"{name}_{place}" for place in range(num_prompts)] if is_batch else [name]


def _engine_id(name: str) -> str:
    """An id that no other request has: samples of ``a`` are shown as ``a_0``, which another client may be called."""
    return f"{name}-{uuid.uuid4().hex}"


def _name(value: Any, field: str) -> str:
    name = checked_text(value, field)
    if not name:
        raise ApiError(f"{field}: is empty; give a name, or leave it out", param=field)
    return name
