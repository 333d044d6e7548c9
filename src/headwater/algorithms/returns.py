"""Rewards still to come."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.algorithms.masked import keep


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """``G = r + gamma·G'`` backwards over the kept tokens, 0 at the others.

    A masked token passes the running return on as it is: the environment's words cost no discount.
    """
    rewards, kept = keep(rewards, mask), mask != 0
    if gamma == 1.0:
        return keep(rewards.flip(-1).cumsum(-1).flip(-1), mask)
    running = torch.zeros_like(rewards[:, 0])
    columns = []
    for column in reversed(range(rewards.shape[1])):
        running = torch.where(kept[:, column], rewards[:, column] + gamma * running, running)
        columns.append(running)
    return keep(torch.stack(columns[::-1], dim=1), mask)
