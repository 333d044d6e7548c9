"""``sampling_params`` of ``/generate``, with SGLang's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.core.records import SamplingParams
from headwater.serving.errors import wrong
from headwater.serving.fields import Fields
from headwater.serving.prompt import ModelLimits
from headwater.serving.sampling import read_min_p, read_stops, refuse_other_distributions
from headwater.serving.text import TextRules

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default."""
TOP_K_ALL = 1 << 30
"""SGLang's other way to keep all tokens."""

_NO_GRAMMAR = "the model is not held to a format"


@dataclass(frozen=True)
class SamplingFields:
    num_samples: int
    seed: int | None
    params: SamplingParams
    rules: TextRules

    @classmethod
    def read(cls, values: Mapping[str, Any], limits: ModelLimits, num_prompt: int, prompt_field: str) -> SamplingFields:
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
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=fields.number("temperature", 1.0, minimum=0),
            top_k=_top_k(fields),
            top_p=fields.number("top_p", 1.0, minimum=0, maximum=1, open_minimum=True),
            min_p=read_min_p(fields),
            min_new_tokens=min_new_tokens,
            stop_token_ids=stop_token_ids,
            stop_strings=stops,
            ignore_end=fields.flag("ignore_eos", False),
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
    refuse_other_distributions(fields)
    fields.neutral("json_schema", [""], _NO_GRAMMAR)
    fields.neutral("regex", [""], _NO_GRAMMAR)
    fields.neutral("ebnf", [""], _NO_GRAMMAR)
    fields.neutral("structural_tag", [""], _NO_GRAMMAR)
    fields.neutral("stop_regex", ["", []], "use stop, which takes plain text")
    fields.neutral("custom_params", [{}], "nothing reads them")
    # How special tokens are spaced, and how often a stream reports, do not change what is generated.
    fields.ignored("spaces_between_special_tokens", "stream_interval")


def _top_k(fields: Fields) -> int:
    value = fields.integer("top_k", -1, minimum=-1)
    if value == 0:
        raise wrong(fields.name("top_k"), value, "must be >= 1, or -1 to keep all tokens")
    return 0 if value == -1 or value >= TOP_K_ALL else value
