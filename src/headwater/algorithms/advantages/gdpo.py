"""GDPO: several rewards, each normalised within its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.advantages.grpo import group_relative
from headwater.algorithms.groups import Groups
from headwater.algorithms.masked import require, whiten
from headwater.config.constraints import MoreThan
from headwater.config.traits import AdvantageTraits
from headwater.core.errors import DataError


@ADVANTAGES.register(
    AdvantageTraits(
        compares_groups=True,
        reads_reward_parts=True,
        scores_alone="compares the parts of the scorer's reward, and {key} is in none of them",
        scores_as_given="reads the scorer's reward_parts instead of the rewards",
        whitens=True,
    )
)
def gdpo(
    inputs: AdvantageInputs,
    *,
    reward_weights: Sequence[float] | None = None,
    normalize_by_std: bool = True,
    epsilon: Annotated[float, MoreThan(0)] = 1e-6,
) -> Advantages:
    """The weighted sum of the GRPO advantages of all rewards, whitened over the tokens of the batch; weights default
    to 1."""
    parts = require(
        inputs.reward_parts, "reward_parts", "algorithm.advantage = gdpo", "use a reward that returns several scores"
    )
    weights = [1.0] * parts.shape[1] if reward_weights is None else list(reward_weights)
    if len(weights) != parts.shape[1]:
        raise DataError(
            f"algorithm.advantage_args.reward_weights = {weights}: the reward has {parts.shape[1]} parts; "
            "give one weight for each"
        )
    groups = Groups.of(inputs.groups, inputs.episodes)
    scaled = [
        weight * group_relative(part, groups, normalize_by_std, epsilon)
        for weight, part in zip(weights, parts.unbind(dim=1), strict=True)
    ]
    total = torch.stack(scaled).sum(dim=0)
    return outcome(whiten(total[:, None].expand_as(inputs.mask), inputs.mask), inputs.mask)
