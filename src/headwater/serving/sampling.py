"""Sampling fields that all APIs share, and the random keys that a seed selects."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass
from typing import Any

from headwater.core.requests import MAX_LOGIT_BIAS, Grammar, SamplingParams, derive_key, wrong_stop
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields
from headwater.serving.prompt import ModelLimits

_LARGEST_BIAS = 100.0
_ANY_OBJECT = '{"type":"object"}'


def read_stops(fields: Fields, field: str = "stop") -> tuple[str, ...]:
    stops, name = fields.texts(field), fields.name(field)
    if "" in stops:
        raise ApiError(
            f"{name}: contains an empty string, which would end every response immediately; remove it", param=name
        )
    if (fault := wrong_stop(stops)) is not None:
        raise ApiError(f"{name}{fault}", param=name)
    return stops


def read_min_p(fields: Fields) -> float:
    value = fields.number("min_p", 0.0, minimum=0, maximum=1)
    if value == 1:
        raise wrong(fields.name("min_p"), value, "must be < 1; use temperature = 0 for greedy sampling")
    return value


@dataclass(frozen=True)
class GuideFields:
    """Fields that change the distribution that is sampled from."""

    logit_bias: tuple[tuple[int, float], ...]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float

    @classmethod
    def read(cls, fields: Fields, limits: ModelLimits) -> GuideFields:
        return cls(
            logit_bias=_read_bias(fields, limits),
            presence_penalty=fields.number("presence_penalty", 0.0, minimum=-2, maximum=2),
            frequency_penalty=fields.number("frequency_penalty", 0.0, minimum=-2, maximum=2),
            repetition_penalty=fields.number("repetition_penalty", 1.0, minimum=0, maximum=10, open_minimum=True),
        )


def _read_bias(fields: Fields, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    """``{"17": -100}``: JSON has only texts as names, so token ids are texts."""
    values, name = fields.mapping("logit_bias") or {}, fields.name("logit_bias")
    if len(values) > MAX_LOGIT_BIAS:
        raise ApiError(f"{name}: has {len(values)} tokens, and the limit is {MAX_LOGIT_BIAS}; use fewer", param=name)
    return tuple((_token(token, name, limits), _bias(bias, f"{name}.{token}")) for token, bias in values.items())


def _token(text: str, name: str, limits: ModelLimits) -> int:
    largest = limits.engine.vocab_size - 1
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(largest)) and int(text) <= largest):
        raise ApiError(f'{name}: {text[:40]!r} is not a token; ids are "0" to "{largest}"', param=name)
    return int(text)


def _bias(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST_BIAS <= value <= _LARGEST_BIAS or math.isnan(value):
        raise wrong(name, value, f"must be a number in [-{_LARGEST_BIAS:g}, {_LARGEST_BIAS:g}]")
    return float(value)


def read_response_format(fields: Fields) -> Grammar | None:
    """OpenAI's ``response_format``: ``text``, ``json_object`` or ``json_schema``."""
    values = fields.mapping("response_format")
    if values is None:
        return None
    parts = Fields(values, fields.name("response_format"))
    kind = parts.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise ApiError(
            "response_format.type: is missing; use text, json_object or json_schema", param="response_format"
        )
    described = parts.mapping("json_schema") if kind == "json_schema" else None
    parts.done()
    if kind == "text":
        return None
    return Grammar("json_schema", _ANY_OBJECT if kind == "json_object" else _read_schema(described))


def _read_schema(described: dict[str, Any] | None) -> str:
    name = "response_format.json_schema"
    if described is None:
        raise ApiError(f'{name}: is missing; give {{"name": ..., "schema": {{...}}}}', param=name)
    parts = Fields(described, name)
    schema = parts.mapping("schema")
    # The schema is always enforced, so strict has no effect.
    parts.ignored("name", "description", "strict")
    parts.done()
    return _ANY_OBJECT if schema is None else json.dumps(schema)


def checked_params(**values: Any) -> SamplingParams:
    """``SamplingParams``. What only the record checks becomes a refusal."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ApiError(str(error)) from error


def sample_keys(seed: int | None, num_samples: int) -> list[int]:
    """One random key per sample of a prompt. Without a seed the keys are different every time.

    A key does not depend on the prompt's position in a batch or on the number of samples. Requesting more samples or
    more prompts therefore does not change the others.
    """
    base = derive_key("seed", seed) if seed is not None else secrets.randbits(64)
    return [derive_key(base, sample) for sample in range(num_samples)]
