"""Group-relative advantages: how much better a response did than its siblings."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs


@ADVANTAGES.register
def grpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """``(s - mean) / (std + epsilon)`` within each group, on every token of the response.

    ``s`` is a response's summed reward; the deviation is the unbiased one. A group of one is compared with mean 0 and
    deviation 1. ``normalize_by_std=False`` leaves the division out (Dr. GRPO).
    """
    scores = inputs.rewards.sum(dim=-1)
    _, group, counts = torch.unique(inputs.groups, return_inverse=True, return_counts=True)
    counts = counts.to(scores.dtype)
    single = counts == 1
    # Counting from the group's lowest score makes equal scores exactly equal to their mean, whatever they are.
    lowest = torch.zeros_like(counts).scatter_reduce_(0, group, scores, "amin", include_self=False)
    scores = torch.where(single[group], scores, scores - lowest[group])
    mean = torch.zeros_like(counts).index_add_(0, group, scores) / counts
    mean = mean.masked_fill(single, 0.0)
    centred = scores - mean[group]
    if normalize_by_std:
        squares = torch.zeros_like(counts).index_add_(0, group, centred.square())
        std = (squares / (counts - 1).clamp(min=1)).sqrt().masked_fill(single, 1.0)
        centred = centred / (std[group] + epsilon)
    advantages: Tensor = centred[:, None] * inputs.mask
    return advantages
