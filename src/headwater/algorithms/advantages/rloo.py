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
    groups = Groups.of(inputs.groups, inputs.episodes)
    size = groups.size.to(inputs.rewards.dtype)
    scores = inputs.scores
    of_episode = groups.of_episode(scores)
    compared = groups.centre(of_episode) * size / (size - 1).clamp(min=1)
    if groups.episodes is not None:
        # A piece is compared with the same baseline as its episode: the mean of the other episodes.
        compared = compared + (scores - of_episode)
    alone = scores if singleton == "score" else torch.zeros_like(scores)
    return outcome(torch.where(groups.single, alone, compared), inputs.mask)
