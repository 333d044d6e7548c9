"""Normalisation of rewards or advantages over the batch or within groups (AReaL)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headwater.algorithms.groups import Groups
from headwater.algorithms.masked import keep

Level = Literal["batch", "group", "none"]


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
    spread = _grouping(numbers, std_level)
    if spread is not None:
        centred = centred / (_std(centred, kept, spread, unbiased) + epsilon)
    return centred.reshape(values.shape).to(values.dtype)


def _grouping(numbers: Tensor, level: Level) -> Groups | None:
    if level == "none":
        return None
    return Groups.of(numbers if level == "group" else torch.zeros_like(numbers))


def _total(values: Tensor, groups: Groups) -> Tensor:
    """``[samples, 1]``: the sum over all entries of the own group's rows."""
    return groups.sum(values.sum(dim=1))[:, None]


def _mean(values: Tensor, kept: Tensor, groups: Groups | None, leave_one_out: bool) -> Tensor:
    if groups is None:
        return torch.zeros_like(values)
    total, count = _total(values, groups), _total(kept, groups)
    if leave_one_out:
        others = (total - values) / (count - 1).clamp(min=1)
        return torch.where(count > 1, others, torch.zeros_like(others))
    return total / count.clamp(min=1)


def _std(centred: Tensor, kept: Tensor, groups: Groups, unbiased: bool) -> Tensor:
    """About the mean that was taken off, whatever its level was."""
    return (_total(centred.square(), groups) / (_total(kept, groups) - int(unbiased)).clamp(min=1)).sqrt()
