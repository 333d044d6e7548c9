"""Normalisation of rewards or advantages over the batch or within groups (AReaL)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headwater.algorithms.groups import Groups
from headwater.algorithms.masked import keep

Level = Literal["batch", "group", "none"]

_ROUNDING = 1e-6
"""A deviation below this share of the largest reward is float32's rounding of scores that agree."""


def normalize(
    values: Tensor,
    *,
    mask: Tensor | None = None,
    groups: Tensor | None = None,
    mean_level: Level = "batch",
    std_level: Level = "batch",
    leave_one_out: bool = False,
    unbiased: bool = True,
    epsilon: float = 1e-5,
) -> Tensor:
    """``(x - mean) / (std + epsilon)``, each over the batch, the row's group, or not at all.

    ``values`` are ``[samples]``, or ``[samples, tokens]`` with statistics over the kept tokens; masked ones become 0.
    With ``leave_one_out`` the mean is over all entries but the own.
    """
    wide = values.double().reshape(len(values), -1)
    kept = torch.ones_like(wide) if mask is None else (mask != 0).double().reshape(wide.shape)
    wide = keep(wide, kept)
    numbers = torch.zeros(len(values), device=values.device) if groups is None else groups
    mean = _mean(wide, kept, _grouping(numbers, mean_level), leave_one_out)
    centred = keep(wide - mean, kept)
    std = _std(centred, kept, _grouping(numbers, std_level), unbiased)
    if std is not None:
        centred = centred / (std + epsilon)
    return centred.reshape(values.shape).to(values.dtype)


def normalize_rewards(
    rewards: Tensor,
    columns: Tensor,
    *,
    groups: Tensor,
    episodes: Tensor | None = None,
    mean_level: Level,
    std_level: Level,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: float,
) -> Tensor:
    """Rewards ``[samples, tokens]`` whose sums are the normalised scores; a score is the sum of a row.

    Every reward is divided by the deviation at its own position. The mean is subtracted only at ``columns``
    ``[samples]``, the positions of the scores, so rewards of turns keep their positions and proportions. If
    normalisation is by group, a sample without others in its group becomes 0. ``episodes`` ``[samples]`` is equal for
    the pieces of an episode; the mean and the deviation are over episodes.
    """
    wide = rewards.double()
    scores = wide.sum(dim=1, keepdim=True)
    kept = torch.ones_like(scores)
    centred = scores - _mean(scores, kept, _grouping(groups, mean_level, episodes), leave_one_out)
    std = _std(centred, kept, _grouping(groups, std_level, episodes), unbiased)
    scale = kept
    if std is not None:
        centred = centred / (std + epsilon)
        # Scores that agree have no deviation to measure turns by: dividing by epsilon would only blow them up.
        scale = (1 / (std + epsilon)).where(std > _ROUNDING * wide.abs().max(), 0.0)
    if "group" in (mean_level, std_level):
        # It cannot be compared, and would always come out as 1 or -1.
        alone = Groups.of(groups, episodes).single[:, None]
        centred, scale = centred.masked_fill(alone, 0.0), scale.masked_fill(alone, 0.0)
    place = columns[:, None]
    elsewhere = (wide * scale).scatter(1, place, 0.0)
    return elsewhere.scatter(1, place, centred - elsewhere.sum(dim=1, keepdim=True)).to(rewards.dtype)


def _grouping(numbers: Tensor, level: Level, episodes: Tensor | None = None) -> Groups | None:
    if level == "none":
        return None
    return Groups.of(numbers if level == "group" else torch.zeros_like(numbers), episodes)


def _total(values: Tensor, groups: Groups) -> Tensor:
    """``[samples, 1]``: the sum over all entries of the own group's rows."""
    return groups.sum(values.sum(dim=1))[:, None]


def _mean(values: Tensor, kept: Tensor, groups: Groups | None, leave_one_out: bool) -> Tensor:
    if groups is None:
        return torch.zeros_like(values)
    total, count = _total(values, groups), _total(kept, groups)
    if leave_one_out:
        others = (total - groups.of_episode(values)) / (count - 1).clamp(min=1)
        return torch.where(count > 1, others, torch.zeros_like(others))
    return total / count.clamp(min=1)


def _std(centred: Tensor, kept: Tensor, groups: Groups | None, unbiased: bool) -> Tensor | None:
    """About the mean that was taken off, whatever its level was."""
    if groups is None:
        return None
    return (_total(centred.square(), groups) / (_total(kept, groups) - int(unbiased)).clamp(min=1)).sqrt()
