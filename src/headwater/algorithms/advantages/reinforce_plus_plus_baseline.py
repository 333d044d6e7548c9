"""REINFORCE++ with the mean of the group as baseline, normalised over the whole batch."""

from __future__ import annotations

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.groups import Groups
from headwater.algorithms.masked import whiten
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(AdvantageTraits(compares_groups=True, subtracts_group_mean=True, whitens=True))
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """``s - mean`` on every token, whitened over the tokens of the batch; a response that is alone has
    baseline 0."""
    centred = Groups.of(inputs.groups, inputs.episodes).centre(inputs.scores)
    return outcome(whiten(centred[:, None].expand_as(inputs.mask), inputs.mask), inputs.mask)
