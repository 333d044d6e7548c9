"""Sampling fields that all dialects read alike."""

from __future__ import annotations

from headwater.engine.request_limits import wrong_stop
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields

_OWN_DISTRIBUTION = "tokens are sampled from the model's own distribution, so that their log-probs can be trained on"


def read_stops(fields: Fields, field: str = "stop") -> tuple[str, ...]:
    stops, name = fields.texts(field), fields.name(field)
    if "" in stops:
        raise ApiError(f"{name}: holds an empty text, which would end every response at once; remove it", param=name)
    if (fault := wrong_stop(stops)) is not None:
        raise ApiError(f"{name}{fault}", param=name)
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
