"""Group policy gradient: centred scores, scaled up for the responses that teach nothing."""

from __future__ import annotations

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.groups import Groups


@ADVANTAGES.register
def gpg(inputs: AdvantageInputs, *, divisor: float = 1.0) -> Advantages:
    """``samples / max(nonzero scores, 1)·(s - mean) / divisor``; a response that is alone keeps its score."""
    scores = inputs.scores
    scale = len(scores) / (scores != 0).sum().clamp(min=1)
    return outcome(scale * Groups.of(inputs.groups).centre(scores) / divisor, inputs.mask)
