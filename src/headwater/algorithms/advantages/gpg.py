"""Group policy gradient: centred scores, scaled up to make up for responses that give no gradient."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, outcome
from headwater.algorithms.groups import Groups
from headwater.config.constraints import MoreThan
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(
    AdvantageTraits(
        compares_groups=True,
        scores_alone="counts the scores that are not 0, and with {key} none is 0",
        scores_as_given="counts the samples whose score is not 0",
    )
)
def gpg(inputs: AdvantageInputs, *, divisor: Annotated[float, MoreThan(0)] = 1.0) -> Advantages:
    """``episodes / max(nonzero scores, 1)·(s - mean) / divisor``; a response that is alone in
    its group keeps its score."""
    scores, groups = inputs.scores, Groups.of(inputs.groups, inputs.episodes)
    of_episodes = groups.per_episode(scores)
    scale = len(of_episodes) / (of_episodes != 0).sum().clamp(min=1)
    return outcome(scale * groups.centre(scores) / divisor, inputs.mask)
