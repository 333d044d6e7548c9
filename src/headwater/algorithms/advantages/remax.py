"""ReMax: the baseline is the score of a greedy response of the same policy."""

from __future__ import annotations

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, returns_to_go
from headwater.algorithms.masked import keep, require
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(
    AdvantageTraits(
        needs_greedy_baseline=True,
        scores_as_given="compares with the score of the greedy response, which is not normalised",
    )
)
def remax(inputs: AdvantageInputs) -> Advantages:
    """Return-to-go minus the score of the greedy response."""
    baselines = require(
        inputs.baselines, "baselines", "algorithm.advantage = remax", "it needs a greedy rollout of every prompt"
    )
    returns = returns_to_go(inputs.rewards, inputs.mask)
    return Advantages(keep(returns - baselines[:, None], inputs.mask), returns)
