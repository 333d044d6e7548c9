"""Pass@k: only the best response of a group gets an advantage, its lead over the second best."""

from __future__ import annotations

from typing import Annotated

import torch

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.groups import Groups
from headwater.config.constraints import MoreThan
from headwater.config.traits import AdvantageTraits
from headwater.core.errors import DataError


@ADVANTAGES.register(
    AdvantageTraits(compares_groups=True, subtracts_group_mean=True, divides_by_group_std="normalize_by_std")
)
def grpo_passk(
    inputs: AdvantageInputs, *, normalize_by_std: bool = True, epsilon: Annotated[float, MoreThan(0)] = 1e-6
) -> Advantages:
    """``(best - second) / (std + epsilon)`` on the best response of each group, 0 on the others; a tie gives 0."""
    scores, groups = inputs.scores, Groups.of(inputs.groups, inputs.episodes)
    if bool(groups.single.any()):
        raise DataError(
            "algorithm.advantage = grpo_passk compares the two best responses of a group, and a group has only one; "
            "set rollout.num_samples_per_prompt to 2 or more"
        )
    of_episode = groups.of_episode(scores)
    best = of_episode == groups.max(of_episode)
    second = groups.max(of_episode.masked_fill(best, -torch.inf))
    leads = best & (groups.sum(best.long()) == 1)
    lead = torch.where(leads, scores - second, torch.zeros_like(scores))
    if normalize_by_std:
        lead = lead / (groups.std(scores) + epsilon)
    return outcome(lead, inputs.mask)
