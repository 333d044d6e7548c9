"""Sampling fields that all dialects read alike."""

from __future__ import annotations

from headwater.engine.server.errors import ApiError, wrong
from headwater.engine.server.fields import Fields

_OWN_DISTRIBUTION = "tokens are sampled from the model's own distribution, so that their log-probs can be trained on"


def read_stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.texts("stop")
    if "" in stops:
        name = fields.name("stop")
        raise ApiError(f"{name}: holds an empty text, which would end every response at once; remove it", param=name)
    return stops


def read_min_p(fields: Fields) -> float:
    value = fields.number("min_p", 0.0, minimum=0, maximum=1)
    if value == 1:
        raise wrong(fields.name("min_p"), value, "must be < 1; use temperature = 0 to take the likeliest token")
    return value


def refuse_other_distributions(fields: Fields) -> None:
    """Penalties and biases are accepted only where they change nothing."""
    fields.neutral("frequency_penalty", [0], _OWN_DISTRIBUTION)
    fields.neutral("presence_penalty", [0], _OWN_DISTRIBUTION)
    fields.neutral("repetition_penalty", [1], _OWN_DISTRIBUTION)
    fields.neutral("logit_bias", [{}], _OWN_DISTRIBUTION)
