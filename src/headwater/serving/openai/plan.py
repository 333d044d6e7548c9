"""What completions and chat have in common: their fields, the engine requests they become, and their replies' head."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwater.chat.parsers import ToolCallParser
from headwater.core.media import Media
from headwater.core.requests import Grammar, ModelRequest, SamplingParams
from headwater.serving.errors import ApiError, shown, wrong
from headwater.serving.fields import Fields
from headwater.serving.options import ServerOptions
from headwater.serving.output import TextRules
from headwater.serving.prompt import ModelLimits
from headwater.serving.sampling import (
    GuideFields,
    checked_params,
    read_min_p,
    read_response_format,
    read_stops,
    sample_keys,
)


@dataclass(frozen=True)
class Shape:
    """What a reply contains."""

    stream: bool
    include_usage: bool
    """Send the token counts at the end of a stream."""
    logprobs: bool
    token_ids: bool
    rules: TextRules
    echo: bool = False
    """The prompt is part of the text and of the log-probs."""


@dataclass(frozen=True)
class CallReading:
    """How tool calls are found in the replies of a plan."""

    parser: ToolCallParser
    schemas: tuple[Mapping[str, Any], ...]
    is_parallel: bool
    in_reasoning: bool
    """The prompt has begun reasoning, so the replies begin inside it."""


@dataclass(frozen=True)
class CallPlan:
    """The engine requests of a call, and the contents of its reply.

    ``requests`` contains the samples of the first prompt, then those of the second. The choices have the same order.
    """

    name: str
    model: str
    created: int
    requests: tuple[ModelRequest, ...]
    num_samples: int
    shape: Shape
    calls: CallReading | None = None
    """None if the replies are plain text."""

    @classmethod
    def build(
        cls,
        prefix: str,
        model: str,
        prompts: Sequence[tuple[tuple[int, ...], SamplingParams]],
        *,
        num_samples: int,
        seed: int | None,
        shape: Shape,
        session: str = "",
        calls: CallReading | None = None,
        media: Media = (),
    ) -> CallPlan:
        """``media`` are the images and videos of every prompt."""
        name = f"{prefix}-{uuid.uuid4().hex}"
        requests: list[ModelRequest] = []
        for tokens, sampling in prompts:
            for key in sample_keys(seed, num_samples):
                request_id = f"{name}-{len(requests)}"
                requests.append(ModelRequest(request_id, tokens, sampling, key, session=session, media=media))
        return cls(name, model, int(time.time()), tuple(requests), num_samples, shape, calls)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.input_tokens) for request in self.requests[:: self.num_samples])

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """For ``ActiveRequests``: the reply's id refers to all its choices."""
        return {self.name: tuple(request.request_id for request in self.requests)}


@dataclass(frozen=True)
class SamplingFields:
    """How the responses of a call are sampled. Their length depends on the prompt."""

    num_samples: int
    seed: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens: int
    ignore_eos: bool
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    guide: GuideFields
    grammar: Grammar | None
    session: str
    """A router sends requests with the same ``prompt_cache_key`` to the same server."""

    @classmethod
    def read(cls, fields: Fields, limits: ModelLimits) -> SamplingFields:
        read = cls(
            num_samples=fields.integer("n", 1, minimum=1),
            seed=fields.optional_integer("seed"),
            temperature=fields.number("temperature", 1.0, minimum=0),
            top_p=fields.number("top_p", 1.0, minimum=0, maximum=1, open_minimum=True),
            top_k=_top_k(fields),
            min_p=read_min_p(fields),
            min_tokens=fields.integer("min_tokens", 0, minimum=0),
            ignore_eos=fields.flag("ignore_eos", False),
            stops=read_stops(fields),
            stop_token_ids=fields.integers("stop_token_ids"),
            guide=GuideFields.read(fields, limits),
            grammar=read_response_format(fields),
            session=fields.text("prompt_cache_key") or "",
        )
        limits.check_ids(read.stop_token_ids, fields.name("stop_token_ids"))
        return read

    def params(
        self, max_new_tokens: int, *, num_top_logprobs: int = 0, prompt_logprobs: bool = False
    ) -> SamplingParams:
        if self.min_tokens > max_new_tokens:
            raise wrong("min_tokens", self.min_tokens, f"must be at most the requested tokens, {max_new_tokens}")
        return checked_params(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            min_new_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            stop_strings=self.stops,
            ignore_end=self.ignore_eos,
            grammar=self.grammar,
            num_top_logprobs=num_top_logprobs,
            prompt_logprobs=prompt_logprobs,
            **asdict(self.guide),
        )


def read_shape(fields: Fields, stops: tuple[str, ...], *, logprobs: bool, echo: bool = False) -> Shape:
    stream = fields.flag("stream", False)
    options = fields.mapping("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise ApiError(
                "stream_options: requires stream = true; set it, or remove stream_options", param="stream_options"
            )
        stream_fields = Fields(options, "stream_options")
        include_usage = stream_fields.flag("include_usage", False)
        stream_fields.neutral("include_obfuscation", [False], "chunks are sent as they are")
        stream_fields.done()
    rules = TextRules(
        stops=stops,
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        keep_stop=fields.flag("include_stop_str_in_output", False),
    )
    return Shape(stream, include_usage, logprobs, fields.flag("return_token_ids", False), rules, echo)


def check_model(fields: Fields, options: ServerOptions) -> str:
    """The model's name for the reply."""
    model = fields.text("model")
    if model is not None and model not in options.names:
        raise unknown_model(model, options)
    return options.served_name


def unknown_model(model: str, options: ServerOptions) -> ApiError:
    known = " or ".join(repr(each) for each in options.names)
    return ApiError(
        f"model = {shown(model)}: this server serves {known}; use that name, or start it with --served-name",
        status=404,
        param="model",
        code="model_not_found",
    )


def refuse_unsupported(fields: Fields) -> None:
    """Fields of both endpoints that are accepted only if they have no effect, and fields that are only labels."""
    fields.neutral("use_beam_search", [False], "responses are sampled")
    # The spacing of special tokens matters only for slow tokenizers, which are not used here.
    fields.ignored("user", "metadata", "spaces_between_special_tokens")


def _top_k(fields: Fields) -> int:
    """Both 0 and -1 keep all tokens, because servers differ in which of the two they use."""
    return max(0, fields.integer("top_k", 0, minimum=-1))


def head(plan: CallPlan, kind: str) -> dict[str, Any]:
    return {"id": plan.name, "object": kind, "created": plan.created, "model": plan.model}


def usage(plan: CallPlan, num_completion_tokens: int) -> dict[str, int]:
    """Token counts. A prompt counts once, regardless of its number of samples."""
    num_prompt_tokens = plan.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def fingerprint(version: int) -> str:
    """The policy version of a reply, in the field where OpenAI names its backend configuration."""
    return f"version-{version}"
