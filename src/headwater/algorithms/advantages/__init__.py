"""Advantage estimators, one file each: ``f(inputs: AdvantageInputs, **settings) -> Advantages``.

Masked tokens get advantage 0 in all of them, whatever the inputs contain there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.algorithms.masked import check_shapes, keep
from headwater.config.arguments import checked
from headwater.core.registry import Registry

ADVANTAGES = Registry("advantage", "headwater.algorithms.advantages", prepare=checked)


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use, ``[samples, tokens]`` unless stated otherwise; None where a run does not provide it.

    All columns except ``rewards`` are set to 0 where ``mask`` is 0.
    """

    rewards: Tensor
    """The score of a sample is the sum of its row, including masked tokens, so that untrained samples count too."""
    mask: Tensor
    """1 on the tokens that are trained."""
    groups: Tensor
    """``[samples]``: equal within a group."""
    episodes: Tensor | None = None
    """``[samples]``: equal for the pieces of an episode. Groups are compared over episodes. None: each is one."""
    values: Tensor | None = None
    """The values of the critic."""
    final_values: Tensor | None = None
    """``[samples]``: the critic's value after the last token of a response that was cut off, 0 for others. None: 0."""
    baselines: Tensor | None = None
    """``[samples]``: the score of the greedy response to the same prompt."""
    turns: Tensor | None = None
    """The number of the turn that each token belongs to; -1 for tokens outside of turns."""
    reward_parts: Tensor | None = None
    """``[samples, parts]``: the scores that make up the reward, if it has several."""
    old_logprobs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    """The sum over the vocabulary of the squared probabilities, at each token."""
    weights: Tensor | None = None
    """Importance weights of a correction."""

    def __post_init__(self) -> None:
        samples = self.mask.shape[0]
        per_sample = {name: getattr(self, name) for name in ("groups", "episodes", "baselines", "final_values")}
        check_shapes((samples,), **per_sample)
        per_token = {name: getattr(self, name) for name in ("values", "old_logprobs", "sum_pi_squared", "weights")}
        check_shapes(tuple(self.mask.shape), rewards=self.rewards, turns=self.turns, **per_token)
        for name, value in per_token.items():
            if value is not None:
                object.__setattr__(self, name, keep(value, self.mask))

    @property
    def scores(self) -> Tensor:
        return self.rewards.sum(dim=-1)


@dataclass(frozen=True)
class Advantages:
    """Both ``[samples, tokens]``, 0 at masked tokens."""

    advantages: Tensor
    returns: Tensor
    """The targets of the critic."""


def outcome(advantages: Tensor, mask: Tensor) -> Advantages:
    """One advantage per sample ``[samples]``, or per token, as both advantage and return."""
    per_token = keep((advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(mask), mask)
    return Advantages(per_token, per_token)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """``G = r + gamma·G'`` backwards over the kept tokens, 0 at the others.

    A masked token passes the running return on without a discount.
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
