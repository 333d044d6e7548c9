"""Sampling fields that all APIs share, and the random keys that a seed selects."""

from __future__ import annotations

import secrets

from headwater.core.randomness import derive_key
from headwater.core.records import wrong_stop
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields

_OWN_DISTRIBUTION = "tokens are sampled from the model's own distribution, so that training can use their log-probs"


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


def refuse_other_distributions(fields: Fields) -> None:
    """Accept penalties and biases only if they have no effect."""
    fields.neutral("frequency_penalty", [0], _OWN_DISTRIBUTION)
    fields.neutral("presence_penalty", [0], _OWN_DISTRIBUTION)
    fields.neutral("repetition_penalty", [1], _OWN_DISTRIBUTION)
    fields.neutral("logit_bias", [{}], _OWN_DISTRIBUTION)


def sample_keys(seed: int | None, num_samples: int) -> list[int]:
    """One random key per sample of a prompt. Without a seed the keys are different every time.

    A key does not depend on the prompt's position in a batch or on the number of samples. Requesting more samples or
    more prompts therefore does not change the others.
    """
    base = derive_key("seed", seed) if seed is not None else secrets.randbits(64)
    return [derive_key(base, sample) for sample in range(num_samples)]
