"""The fields that completions and chat have in common."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.records import SamplingParams
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields
from headwater.serving.openai.plan import Shape
from headwater.serving.prompt import ModelLimits
from headwater.serving.sampling import read_min_p, read_stops, refuse_other_distributions
from headwater.serving.text import TextRules


@dataclass(frozen=True)
class SamplingFields:
    """How every response of a request is drawn; how long it may be depends on its prompt."""

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
        )
        limits.check_ids(read.stop_token_ids, fields.name("stop_token_ids"))
        return read

    def params(self, max_new_tokens: int) -> SamplingParams:
        if self.min_tokens > max_new_tokens:
            raise wrong("min_tokens", self.min_tokens, f"must be at most the tokens asked for, {max_new_tokens}")
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            min_new_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            stop_strings=self.stops,
            ignore_end=self.ignore_eos,
        )


def read_shape(fields: Fields, stops: tuple[str, ...], *, logprobs: bool) -> Shape:
    stream = fields.flag("stream", False)
    options = fields.mapping("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise ApiError("stream_options: goes with stream = true; set that, or remove it", param="stream_options")
        stream_fields = Fields(options, "stream_options")
        include_usage = stream_fields.flag("include_usage", False)
        stream_fields.neutral("include_obfuscation", [False], "chunks are sent as they are")
        stream_fields.done()
    rules = TextRules(
        stops=stops,
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        keep_stop=fields.flag("include_stop_str_in_output", False),
    )
    return Shape(stream, include_usage, logprobs, fields.flag("return_token_ids", False), rules)


def check_model(fields: Fields, served_name: str) -> str:
    model = fields.text("model")
    if model is not None and model != served_name:
        raise unknown_model(model, served_name)
    return served_name


def unknown_model(model: str, served_name: str) -> ApiError:
    return ApiError(
        f"model = {model!r}: this server has {served_name!r}; use that name, or start it with --served-name",
        status=404,
        param="model",
        code="model_not_found",
    )


def refuse_unsupported(fields: Fields) -> None:
    """Fields of both endpoints that are accepted only where they ask for nothing, and those that are only labels."""
    refuse_other_distributions(fields)
    fields.neutral("use_beam_search", [False], "responses are sampled")
    # How special tokens are spaced matters only to tokenizers that the engine does not load.
    fields.ignored("user", "spaces_between_special_tokens")


def _top_k(fields: Fields) -> int:
    """Both 0 and -1 keep all tokens: servers differ in which of the two they take."""
    return max(0, fields.integer("top_k", 0, minimum=-1))
