"""OPO: the length-weighted mean score, the optimal baseline if the variance of the gradient grows with length."""

from __future__ import annotations

import torch

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.groups import Groups
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(AdvantageTraits(compares_groups=True, subtracts_group_mean=True))
def opo(inputs: AdvantageInputs) -> Advantages:
    """``s - Σ(length·s)/Σ(length)`` over the group; a response that is alone in its group keeps its score."""
    scores, groups = inputs.scores, Groups.of(inputs.groups, inputs.episodes)
    lengths = groups.total_of_episode(inputs.mask.sum(dim=-1))
    # Measured from the lowest score, so that equal scores give exactly 0.
    above = scores - groups.min(scores)
    baseline = groups.sum(lengths * groups.of_episode(above)) / groups.sum(lengths).clamp(min=1)
    return outcome(torch.where(groups.single, scores, above - baseline), inputs.mask)
