"""Importance weights of a batch: their scale and how much of the batch they leave."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.algorithms.masked import EPSILON, masked_mean, masked_sum


def batch_normalize(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    """Weights divided by their mean, over tokens or, where a sequence has one weight, over sequences."""
    mean = mean_weight(weights, mask, level)
    return torch.where(mean > EPSILON, weights / mean, weights)


def mean_weight(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        return masked_mean(weights, mask)
    nonempty = (mask != 0).any(dim=-1)
    return masked_sum(masked_mean(weights, mask, dim=-1), nonempty) / nonempty.sum().clamp(min=1)


def weight_sums(weights: Tensor, mask: Tensor) -> Tensor:
    """``[3]``: how many weights the mask keeps, their sum, and that of their squares. Sums of parts add up."""
    kept = weights.detach().double()
    return torch.stack([(mask != 0).sum().double(), masked_sum(kept, mask), masked_sum(kept.square(), mask)])


def effective_sample_size(count: float, total: float, squares: float) -> float:
    """``mean(w)² / mean(w²)`` from ``weight_sums``: the share of the batch that counts.

    1 where all weights are equal, however small; 0 where all are 0.
    """
    return total**2 / (count * squares) if squares else 0.0
