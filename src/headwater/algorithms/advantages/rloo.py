"""REINFORCE with a leave-one-out baseline: the mean of the other responses of the group."""

from __future__ import annotations

from typing import Literal

import torch

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.groups import Groups
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(AdvantageTraits(compares_groups=True, subtracts_group_mean=True))
def rloo(inputs: AdvantageInputs, *, singleton: Literal["zero", "score"] = "zero") -> Advantages:
    """``n/(n-1)·(s - mean)``. A response that is alone has no baseline: it gets 0, or keeps its ``score``."""
    groups = Groups.of(inputs.groups)
    size = groups.size.to(inputs.rewards.dtype)
    centred = groups.centre(inputs.scores)
    alone = centred if singleton == "score" else torch.zeros_like(centred)
    return outcome(torch.where(groups.single, alone, centred * size / (size - 1).clamp(min=1)), inputs.mask)
