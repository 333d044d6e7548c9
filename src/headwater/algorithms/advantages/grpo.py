"""Group-relative advantages: how much better a response did than its siblings."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.algorithms.advantages import ADVANTAGES


@ADVANTAGES.register
def grpo(
    rewards: Tensor, mask: Tensor, groups: Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """``(s - mean) / (std + epsilon)`` within each group, on every token of the response.

    ``s`` is a response's summed reward; the deviation is the unbiased one. A group of one is compared with mean 0 and
    deviation 1. ``normalize_by_std=False`` leaves the division out (Dr. GRPO).
    """
    scores = rewards.sum(dim=-1)
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    counts = counts.to(scores.dtype)
    single = counts == 1
    mean = torch.zeros_like(counts).index_add_(0, group, scores) / counts
    mean = mean.masked_fill(single, 0.0)
    centred = scores - mean[group]
    if normalize_by_std:
        squares = torch.zeros_like(counts).index_add_(0, group, centred.square())
        std = (squares / (counts - 1).clamp(min=1)).sqrt().masked_fill(single, 1.0)
        centred = centred / (std[group] + epsilon)
    advantages: Tensor = centred[:, None] * mask
    return advantages
