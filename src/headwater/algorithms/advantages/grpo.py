"""Group-relative advantages: how much better a response is than the others to the same prompt."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.groups import Groups
from headwater.config.constraints import MoreThan
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(
    AdvantageTraits(compares_groups=True, subtracts_group_mean=True, divides_by_group_std="normalize_by_std")
)
def grpo(
    inputs: AdvantageInputs, *, normalize_by_std: bool = True, epsilon: Annotated[float, MoreThan(0)] = 1e-6
) -> Advantages:
    """``(s - mean) / (std + epsilon)`` within each group, on every token of the response.

    ``s`` is the sum of the rewards of a response; the deviation is the unbiased one. A group of one is compared with
    mean 0 and deviation 1. ``normalize_by_std=False`` omits the division (Dr. GRPO).
    """
    groups = Groups.of(inputs.groups, inputs.episodes)
    return outcome(group_relative(inputs.scores, groups, normalize_by_std, epsilon), inputs.mask)


def group_relative(scores: Tensor, groups: Groups, normalize_by_std: bool, epsilon: float) -> Tensor:
    centred = groups.centre(scores)
    return centred / (groups.std(scores) + epsilon) if normalize_by_std else centred
