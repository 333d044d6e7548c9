"""REINFORCE++: discounted returns, normalised over the whole batch instead of a group."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, returns_to_go
from headwater.algorithms.masked import whiten
from headwater.config.constraints import Within
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(AdvantageTraits(discount="gamma", whitens="whitened"))
def reinforce_plus_plus(
    inputs: AdvantageInputs, *, gamma: Annotated[float, Within(0, 1)] = 1.0, whitened: bool = True
) -> Advantages:
    """The return-to-go of every token, whitened over the batch unless ``whitened=False``."""
    returns = returns_to_go(inputs.rewards, inputs.mask, gamma)
    return Advantages(whiten(returns, inputs.mask) if whitened else returns, returns)
