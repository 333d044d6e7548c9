"""Generalised advantage estimation: discounted sums of the temporal-difference errors of a critic."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages
from headwater.algorithms.masked import keep, require, whiten
from headwater.config.constraints import Within
from headwater.config.traits import AdvantageTraits


@ADVANTAGES.register(
    AdvantageTraits(needs_values=True, bootstraps=True, varies_by_token=True, discount="gamma", whitens="whitened")
)
def gae(
    inputs: AdvantageInputs,
    *,
    gamma: Annotated[float, Within(0, 1)] = 1.0,
    lam: Annotated[float, Within(0, 1)] = 1.0,
    whitened: bool = True,
) -> Advantages:
    """``A = δ + gamma·lam·A'`` with ``δ = r + gamma·V' - V``; returns are ``A + V`` before whitening.

    After the last token ``V'`` is 0, or the value after a response that was cut off
    (``critic.bootstrap_unfinished``).
    """
    values = require(inputs.values, "values", "algorithm.advantage = gae", "it needs a critic")
    advantages = keep(gae_recursion(inputs.rewards, values, inputs.mask, gamma, lam, inputs.final_values), inputs.mask)
    returns = keep(advantages + values, inputs.mask)
    return Advantages(whiten(advantages, inputs.mask) if whitened else advantages, returns)


def gae_recursion(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, final_values: Tensor | None = None
) -> Tensor:
    """The raw advantages. A masked token gets the advantage of the next kept one: the recursion passes through it.

    ``final_values`` ``[samples]`` are the values of what would come after the last kept token; 0 by default.
    """
    rewards, values, kept = keep(rewards, mask), keep(values, mask), mask != 0
    advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(advantage) if final_values is None else final_values.to(advantage)
    columns = []
    for column in reversed(range(values.shape[1])):
        here = kept[:, column]
        surprise = rewards[:, column] + gamma * next_value - values[:, column]
        advantage = torch.where(here, surprise + gamma * lam * advantage, advantage)
        next_value = torch.where(here, values[:, column], next_value)
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1)
