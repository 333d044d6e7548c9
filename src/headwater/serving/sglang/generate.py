"""``POST /generate``: reading the body and formatting the reply."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

from headwater.core.media import Media, MediaContent
from headwater.core.protocols import Tokenizer
from headwater.core.requests import Grammar, ModelRequest, SamplingParams, StopReason
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, check_name, checked_text, is_integer
from headwater.serving.media import PixelBudget, encode_media, expand_media, pixels_of_request, take_media
from headwater.serving.output import OutputPiece, TextRules, token_text
from headwater.serving.prompt import ModelLimits
from headwater.serving.sampling import GuideFields, checked_params, read_min_p, read_stops, sample_keys

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default."""
TOP_K_ALL = 1 << 30
"""SGLang's other value for keeping all tokens."""

_OTHER_GRAMMARS = "use json_schema or regex"
TokensWithMedia = tuple[tuple[int, ...], Media]

_ABORTED = "the request was aborted by a control call"
_ONLY_SAMPLED = "only the log-probs of sampled tokens are available"
_ONLY_TEXT = "this server accepts text or token ids"
_ONLY_IMAGES = "this server accepts text or token ids, and image_data"
_ONE_MODEL = "the server has one model, without adapters"
_ONE_SERVER = "this server is not part of a distributed deployment"
_NOT_KEPT = "the engine returns only tokens and log-probs"
_OWN_DISTRIBUTION = "tokens are sampled from the model's own distribution"

_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("logprob_start_len", (-1,), _ONLY_SAMPLED),
    ("top_logprobs_num", (0,), _ONLY_SAMPLED),
    ("token_ids_logprob multi_item_delimiter_indices token_indices_to_pool", ([],), _ONLY_SAMPLED),
    ("return_sampling_mask return_entropy", (False,), _ONLY_SAMPLED),
    ("return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs", (False,), _ONLY_SAMPLED),
    ("return_flat_raw_top_logprobs_b64", (False,), _ONLY_SAMPLED),
    ("sampling_logprobs_mode", ("selected",), _ONLY_SAMPLED),
    ("input_embeds positional_embed_overrides", ([],), _ONLY_TEXT),
    ("video_data audio_data", ([], ""), _ONLY_IMAGES),
    ("use_audio_in_video", (False,), _ONLY_IMAGES),
    ("video_config images_config mm_processor_kwargs", ({},), "images are read as the model's processor says"),
    ("min_dynamic_patch max_dynamic_patch", (), "images are read as the model's processor says"),
    ("image_max_dynamic_patch video_max_dynamic_patch", (), "images are read as the model's processor says"),
    ("modalities", ([], ["image"], ["multi-images"]), _ONLY_IMAGES),
    ("mm_hashes mm_content_hashes", ([],), _ONLY_TEXT),
    ("session_params", ({},), "requests are independent; send the whole prompt"),
    ("lora_path lora_id", ("",), _ONE_MODEL),
    ("custom_logit_processor watermark", ("",), _OWN_DISTRIBUTION),
    ("return_hidden_states return_routed_experts return_indexer_topk return_bytes", (False,), _NOT_KEPT),
    ("routed_experts_start_len", (0,), _NOT_KEPT),
    ("return_prompt_token_ids", (False,), "send input_ids instead of text"),
    ("bootstrap_host bootstrap_pair_key http_worker_ipc", ("",), _ONE_SERVER),
    ("bootstrap_port bootstrap_room decode_tp_size", (), _ONE_SERVER),
    ("routed_dp_rank data_parallel_rank disagg_prefill_dp_rank", (0,), _ONE_SERVER),
    ("need_wait_for_mm_inputs", (False,), _ONE_SERVER),
    ("num_items_assigned kv_hints", ({},), _ONE_SERVER),
    ("encoder_urls", ([],), _ONE_SERVER),
    ("background", (False,), "the reply is sent on the same connection"),
    ("require_reasoning", (False,), "request it in the prompt"),
    ("max_thinking_tokens", (), "use sampling_params.max_new_tokens"),
    ("priority", (0,), "requests are served in the order of their arrival"),
)
"""Fields, their values that change nothing, and why others are refused. All fields of SGLang 0.5.23 are known here."""
_LABELS = (
    "log_metrics",
    "no_logs",
    "custom_labels",
    "conversation_id",
    "extra_key",
    "cache_salt",
    "external_trace_header",
    "received_time",
)


@dataclass(frozen=True)
class Sample:
    """One response: its request, and what its reply contains."""

    name: str
    """The reply's id: the client's ``rid``, with a number if there are several samples."""
    request: ModelRequest
    rules: TextRules
    logprobs: bool
    token_texts: bool


@dataclass(frozen=True)
class GenerateCall:
    samples: tuple[Sample, ...]
    """The samples of the first prompt, then those of the second."""
    is_list: bool
    """Whether the reply is a list, because there are several prompts or samples."""
    stream: bool
    names: Mapping[str, tuple[str, ...]]
    """For ``ActiveRequests``: the names that ``/abort_request`` accepts."""

    @property
    def requests(self) -> tuple[ModelRequest, ...]:
        return tuple(sample.request for sample in self.samples)


def read_generate(body: Mapping[str, Any], limits: ModelLimits) -> GenerateCall:
    fields = Fields(body)
    is_batch, prompts = _prompts(fields, limits, fields.raw("image_data"))
    sampling = _per_prompt(fields, "sampling_params", len(prompts), {}, dict, "an object")
    logprobs = _per_prompt(fields, "return_logprob", len(prompts), False, bool, "true or false")
    token_texts = fields.flag("return_text_in_logprobs", False)
    stream = fields.flag("stream", False)
    rid = fields.raw("rid")
    # Both names say which requests a router should keep together.
    session, routing_key = fields.text("session_id"), fields.text("routing_key")
    for names_of_fields, neutral, reason in _UNSUPPORTED:
        for field in names_of_fields.split():
            fields.neutral(field, neutral, reason)
    fields.ignored(*_LABELS)
    fields.done()

    prompts_field = "input_ids" if body.get("text") is None else "text"
    samples: list[Sample] = []
    names: dict[str, tuple[str, ...]] = {}
    rids = _rids(rid, len(prompts), is_batch)
    for place, (rid_of_prompt, (tokens, media)) in enumerate(zip(rids, prompts, strict=True)):
        prompt_field = f"{prompts_field}[{place}]" if is_batch else prompts_field
        read = SglangSampling.read(sampling[place], limits, num_prompt=len(tokens), prompt_field=prompt_field)
        limits.check_count(len(samples) + read.num_samples, "sampling_params.n")
        ids = tuple(_engine_id(rid_of_prompt) for _ in range(read.num_samples))
        names[rid_of_prompt] = ids
        for number, (request_id, key) in enumerate(zip(ids, sample_keys(read.seed, read.num_samples), strict=True)):
            name = rid_of_prompt if read.num_samples == 1 else f"{rid_of_prompt}_{number}"
            request = ModelRequest(
                request_id, tokens, read.params, key, session=routing_key or session or "", media=media
            )
            samples.append(Sample(name, request, read.rules, logprobs[place], token_texts))
    if isinstance(rid, str) and is_batch:
        names[rid] = tuple(sample.request.request_id for sample in samples)
    return GenerateCall(tuple(samples), is_batch or len(samples) > 1, stream, names)


def _prompts(fields: Fields, limits: ModelLimits, images: Any) -> tuple[bool, list[TokensWithMedia]]:
    """Whether the prompts form a batch, and their tokens with their images."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (ids is None):
        given = "both are given" if text is not None else "neither is given"
        raise ApiError(f"text, input_ids: {given}; give exactly one of the two", param="text")
    field, values = ("text", text) if text is not None else ("input_ids", ids)
    if field == "input_ids" and not isinstance(ids, list):
        raise wrong("input_ids", ids, "must be a list of token ids, or a list of such lists")
    if isinstance(values, list):
        _refuse_no_prompts(values, field)
    read = partial(_prompt_of_text if text is not None else _prompt_of_ids, limits=limits, pixels=pixels_of_request())
    if not isinstance(values, list) or (field == "input_ids" and is_integer(values[0])):
        return False, [read(values, images, field=field, images_field="image_data")]
    limits.check_count(len(values), field)
    per_prompt = [None] * len(values) if images in (None, "", []) else images
    if not isinstance(per_prompt, list) or len(per_prompt) != len(values):
        count = f"a list of {len(per_prompt)}" if isinstance(per_prompt, list) else "one image"
        raise ApiError(
            f"image_data: {count} for {len(values)} prompts; give a list with one list of images per prompt",
            param="image_data",
        )
    return True, [
        read(value, of_prompt, field=f"{field}[{place}]", images_field=f"image_data[{place}]")
        for place, (value, of_prompt) in enumerate(zip(values, per_prompt, strict=True))
    ]


def _prompt_of_text(
    text: Any, images: Any, *, limits: ModelLimits, pixels: PixelBudget, field: str, images_field: str
) -> TokensWithMedia:
    contents = _contents(images, limits, pixels, images_field)
    if not contents:
        return limits.tokens_of_text(text, field), ()
    return encode_media(limits.short_text(text, field), contents, limits, images_field)


def _prompt_of_ids(
    ids: Any, images: Any, *, limits: ModelLimits, pixels: PixelBudget, field: str, images_field: str
) -> TokensWithMedia:
    """Token ids, with one placeholder per image as SGLang expects them."""
    tokens, contents = limits.tokens_of_ids(ids, field), _contents(images, limits, pixels, images_field)
    return expand_media(tokens, contents, limits, images_field) if contents else (tokens, ())


def _contents(images: Any, limits: ModelLimits, pixels: PixelBudget, field: str) -> list[MediaContent]:
    """The images of one prompt: one, or a list. Each is a data URL, or base64 alone."""
    values = images if isinstance(images, list) else [] if images in (None, "") else [images]
    parts = []
    for place, value in enumerate(values):
        url = value.get("url") if isinstance(value, dict) else value
        if not isinstance(url, str):
            raise wrong(f"{field}[{place}]", value, "must be a data URL, or an image in base64")
        # Not "/": the base64 text of every JPEG file begins with it.
        is_address = url.startswith(("data:", "http://", "https://", "file:"))
        parts.append({"type": "image_url", "image_url": url if is_address else f"data:;base64,{url}"})
    if parts and limits.processor is None:
        raise ApiError(
            f"{field}: this server's model or engine reads only text; remove the images, or serve a vision model",
            param="image_data",
            code="unsupported",
        )
    return take_media([{"role": "user", "content": parts}], limits, field, pixels)[1]


def _refuse_no_prompts(values: list[Any], field: str) -> None:
    if not values:
        raise ApiError(f"{field}: is an empty list; give at least one prompt", param=field)


def _per_prompt(fields: Fields, field: str, num_prompts: int, default: Any, kind: type, rule: str) -> list[Any]:
    """One value for all prompts, or a list with one value per prompt."""
    value = fields.raw(field)
    if value is None:
        return [default] * num_prompts
    values = value if isinstance(value, list) else [value] * num_prompts
    if len(values) != num_prompts:
        raise ApiError(
            f"{field}: a list of {len(values)} for {num_prompts} prompts; give one per prompt, or one for all",
            param=field,
        )
    for place, each in enumerate(values):
        if not isinstance(each, kind):
            name = f"{field}[{place}]" if isinstance(value, list) else field
            raise wrong(name, each, f"must be {rule}")
    return values


def _rids(rid: Any, num_prompts: int, is_batch: bool) -> list[str]:
    """The name of each prompt's request. A single name for a batch is the prefix of all names, as in SGLang."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(num_prompts)]
    if isinstance(rid, list):
        if len(rid) != num_prompts:
            raise ApiError(f"rid: a list of {len(rid)} for {num_prompts} prompts; give one per prompt", param="rid")
        names = [_name(each, f"rid[{place}]") for place, each in enumerate(rid)]
        if len(set(names)) != len(names):
            raise ApiError("rid: contains a name twice; give every prompt a different name", param="rid")
        return names
    name = _name(rid, "rid")
    return [f"{name}_{place}" for place in range(num_prompts)] if is_batch else [name]


def _engine_id(name: str) -> str:
    """A unique id. The samples of ``a`` are shown as ``a_0``, which may be the name of another client's request."""
    return f"{name}-{uuid.uuid4().hex}"


def _name(value: Any, field: str) -> str:
    name = checked_text(value, field)
    if not name:
        raise ApiError(f"{field}: is empty; give a name, or omit the field", param=field)
    check_name(name, field)
    return name


@dataclass(frozen=True)
class SglangSampling:
    """``sampling_params``, with SGLang's names and defaults."""

    num_samples: int
    seed: int | None
    params: SamplingParams
    rules: TextRules

    @classmethod
    def read(cls, values: Mapping[str, Any], limits: ModelLimits, num_prompt: int, prompt_field: str) -> SglangSampling:
        fields = Fields(values, "sampling_params")
        asked = fields.optional_integer("max_new_tokens", minimum=1)
        max_new_tokens = limits.num_new_tokens(
            num_prompt, asked, DEFAULT_MAX_NEW_TOKENS, fields.name("max_new_tokens"), prompt_field=prompt_field
        )
        min_new_tokens = fields.integer("min_new_tokens", 0, minimum=0)
        if min_new_tokens > max_new_tokens:
            rule = f"must be at most max_new_tokens = {max_new_tokens}"
            raise wrong(fields.name("min_new_tokens"), min_new_tokens, rule)
        stops = read_stops(fields)
        stop_token_ids = fields.integers("stop_token_ids")
        limits.check_ids(stop_token_ids, fields.name("stop_token_ids"))
        params = checked_params(
            max_new_tokens=max_new_tokens,
            temperature=fields.number("temperature", 1.0, minimum=0),
            top_k=_top_k(fields),
            top_p=fields.number("top_p", 1.0, minimum=0, maximum=1, open_minimum=True),
            min_p=read_min_p(fields),
            min_new_tokens=min_new_tokens,
            stop_token_ids=stop_token_ids,
            stop_strings=stops,
            ignore_end=fields.flag("ignore_eos", False),
            grammar=_grammar(fields),
            **asdict(GuideFields.read(fields, limits)),
        )
        rules = TextRules(
            stops=stops,
            skip_special_tokens=fields.flag("skip_special_tokens", True),
            keep_stop=fields.flag("no_stop_trim", False),
        )
        read = cls(fields.integer("n", 1, minimum=1), fields.optional_integer("sampling_seed"), params, rules)
        _refuse_unsupported(fields)
        fields.done()
        return read


def _refuse_unsupported(fields: Fields) -> None:
    fields.neutral("ebnf", [""], _OTHER_GRAMMARS)
    fields.neutral("structural_tag", [""], _OTHER_GRAMMARS)
    fields.neutral("stop_regex", ["", []], "use stop, which accepts plain text")
    fields.neutral("custom_params", [{}], "they have no effect")
    fields.neutral("watermark", [{}], _OWN_DISTRIBUTION)
    fields.neutral("beam_width", [1], _OWN_DISTRIBUTION)
    # The spacing of special tokens and the interval of a stream do not change the generated tokens.
    fields.ignored("spaces_between_special_tokens", "stream_interval")


def _grammar(fields: Fields) -> Grammar | None:
    schema, regex = fields.text("json_schema"), fields.text("regex")
    if schema and regex:
        raise ApiError("json_schema, regex: both are given; give one of the two", param=fields.name("regex"))
    if schema:
        return Grammar("json_schema", schema)
    return Grammar("regex", regex) if regex else None


def _top_k(fields: Fields) -> int:
    value = fields.integer("top_k", -1, minimum=-1)
    if value == 0:
        raise wrong(fields.name("top_k"), value, "must be >= 1, or -1 to keep all tokens")
    return 0 if value == -1 or value >= TOP_K_ALL else value


class GenerateReply:
    """Collects the pieces of one response. Every event of a stream contains the response so far, as in SGLang."""

    def __init__(self, sample: Sample, tokenizer: Tokenizer) -> None:
        self._sample = sample
        self._tokenizer = tokenizer
        self._text = ""
        self._tokens: list[int] = []
        self._versions: list[int] = []
        self._logprobs: list[tuple[float, int, str | None]] = []
        self._finish: dict[str, Any] | None = None

    def add(self, piece: OutputPiece) -> None:
        self._text += piece.text
        self._tokens.extend(piece.tokens)
        self._versions.extend(piece.versions)
        if self._sample.logprobs:
            for logprob, token in zip(piece.logprobs, piece.tokens, strict=True):
                text = token_text(self._tokenizer, token) if self._sample.token_texts else None
                self._logprobs.append((logprob, token, text))
        if piece.stop_reason is not None:
            self._finish = finish_reason(piece.stop_reason, piece.matched, self._sample.request.sampling)

    def body(self, version: int, **extra: Any) -> dict[str, Any]:
        """``version`` is the engine's version, for a response without tokens."""
        request = self._sample.request
        meta_info: dict[str, Any] = {
            "id": self._sample.name,
            "finish_reason": self._finish,
            "prompt_tokens": len(request.input_tokens),
            "completion_tokens": len(self._tokens),
            "weight_version": str(self._versions[-1] if self._versions else version),
            "weight_versions": list(_spans(self._versions)),
            "output_versions": self._versions,
        }
        if self._sample.logprobs:
            meta_info["output_token_logprobs"] = self._logprobs
        return {"text": self._text, "output_ids": self._tokens, "meta_info": {**meta_info, **extra}}


def _spans(versions: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Which weights produced which tokens, as newer versions of SGLang tell it."""
    start = 0
    for version, tokens in groupby(versions):
        end = start + len(list(tokens))
        yield {"version": str(version), "start": start, "end": end}
        start = end


def finish_reason(
    stop_reason: StopReason, matched: str | int | None, sampling: SamplingParams
) -> dict[str, str | int | None]:
    if stop_reason == "length":
        return {"type": "length", "length": sampling.max_new_tokens}
    if stop_reason == "abort":
        return {"type": "abort", "message": _ABORTED}
    return {"type": "stop", "matched": matched}
