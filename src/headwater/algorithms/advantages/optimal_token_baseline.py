"""A baseline for every position: the mean return-to-go of the group, weighted by the gradient noise of each sample."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs, Advantages, returns_to_go
from headwater.algorithms.groups import Groups
from headwater.algorithms.masked import keep, require
from headwater.config.constraints import MoreThan
from headwater.config.traits import AdvantageTraits

_USER = "algorithm.advantage = optimal_token_baseline"


@ADVANTAGES.register(AdvantageTraits(compares_groups=True, needs_recomputed_logprobs=True, varies_by_token=True))
def optimal_token_baseline(
    inputs: AdvantageInputs,
    *,
    skip_masked: bool = False,
    zero_tail: bool = True,
    epsilon: Annotated[float, MoreThan(0)] = 1e-8,
) -> Advantages:
    """``A_t = G_t - Σ(G_t·W_t) / Σ(W_t)`` over the group, ``W_t`` summing ``(1 - 2·p + Σp²)·w²`` up to ``t``.

    Position ``t`` is a column; with ``skip_masked`` it counts trained tokens only, so that multi-turn samples are
    compared at equal progress. ``zero_tail`` uses no baseline where only the longest sample is left, which would
    otherwise be its own baseline. Importance weights ``w`` are used if the run has them.

    Equal returns have a baseline of exactly their value.
    """
    old_logprobs = require(inputs.old_logprobs, "old_logprobs", _USER, "set algorithm.old_logprobs")
    sum_pi_squared = require(inputs.sum_pi_squared, "sum_pi_squared", _USER, "the learner must compute it")
    mask, groups = inputs.mask, Groups.of(inputs.groups, inputs.episodes)
    returns = returns_to_go(inputs.rewards, mask)
    noise = 1 - 2 * old_logprobs.exp() + sum_pi_squared
    if inputs.weights is not None:
        noise = noise * inputs.weights.square()
    path_noise = keep(noise, mask).cumsum(dim=-1)
    position = _positions(mask, skip_masked)
    lengths = mask.sum(dim=-1).long()

    # Measured from the lowest return of the group, equal returns are 0 before any rounding.
    lowest = _lowest(returns, mask, groups)
    above = keep(returns - lowest, mask)
    numerator = _group_sum(keep(above * path_noise, mask), position, groups)
    baseline = numerator / (_group_sum(keep(path_noise, mask), position, groups) + epsilon)
    compared = groups.sum((groups.max_of_episode(lengths) > 0).long()) if skip_masked else groups.size
    has_baseline = (compared > 1)[:, None].expand_as(position)
    if zero_tail:
        has_baseline = has_baseline & (position < _shared_length(lengths, groups)[:, None])
    return Advantages(keep(torch.where(has_baseline, above - baseline, returns), mask), returns)


def _positions(mask: Tensor, skip_masked: bool) -> Tensor:
    if skip_masked:
        return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return torch.arange(mask.shape[1], device=mask.device).expand_as(mask)


def _group_sum(values: Tensor, position: Tensor, groups: Groups) -> Tensor:
    """The sum over the group of the values at the same position, for every token."""
    by_position = torch.zeros_like(values).scatter_add_(1, position, values)
    return groups.sum(by_position).gather(1, position)


def _lowest(returns: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """``[samples, 1]``: the lowest return at any kept token of the group; 0 where none is kept."""
    lowest = groups.min(returns.masked_fill(mask == 0, torch.inf).amin(dim=-1))
    return lowest.masked_fill(lowest.isinf(), 0.0)[:, None]


def _shared_length(lengths: Tensor, groups: Groups) -> Tensor:
    """``[samples]``: for the longest sample of a group, the second largest length; for the others, no limit."""
    lengths = groups.max_of_episode(lengths)
    longest = lengths == groups.max(lengths)
    alone = longest & (groups.sum(longest.long()) == 1)
    second = groups.max(lengths.masked_fill(longest, 0))
    return torch.where(alone, second, torch.full_like(lengths, torch.iinfo(lengths.dtype).max))
