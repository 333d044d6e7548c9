"""Approximates the proximal policy between the one that sampled and the current one, without a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.algorithms.masked import masked_mean

_SMALLEST = 1e-10
"""A probability, so that the logarithm of 0 is finite."""


def progress(versions: Tensor, current_version: int) -> Tensor:
    """``alpha = clamp((v-1-v_b)/(v-v_b), 0, 1)``: how far the proximal policy ``v - 1`` is on the way from the
    version ``v_b`` that sampled a token to the current ``v``; 0 for tokens that were not sampled or are not older."""
    behind = current_version - versions
    alpha = ((behind - 1) / behind.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where((behind > 0) & (versions >= 0), alpha, torch.zeros_like(alpha))


def loglinear(rollout_logprobs: Tensor, logprobs: Tensor, versions: Tensor, current_version: int) -> Tensor:
    """``behaviour + alpha·(current - behaviour)``: the geometric mean of the two policies."""
    alpha = progress(versions, current_version)
    return rollout_logprobs + alpha * (logprobs - rollout_logprobs)


def linear(rollout_logprobs: Tensor, logprobs: Tensor, versions: Tensor, current_version: int) -> Tensor:
    """The log of ``(1-alpha)·behaviour + alpha·current``: the mixture of the two policies."""
    alpha = progress(versions, current_version)
    return ((1 - alpha) * rollout_logprobs.exp() + alpha * logprobs.exp() + _SMALLEST).log()


def approximation_metrics(
    rollout_logprobs: Tensor, recomputed: Tensor, versions: Tensor, current_version: int, mask: Tensor
) -> dict[str, float]:
    """The errors of both approximations of the recomputed proximal policy, over the kept tokens."""
    metrics: dict[str, float] = {}
    for name, approximate in (("proximal", loglinear), ("proximal_linear", linear)):
        error = approximate(rollout_logprobs, recomputed, versions, current_version) - recomputed
        metrics |= {
            f"{name}_error_mean": float(masked_mean(error, mask)),
            f"{name}_error_abs": float(masked_mean(error.abs(), mask)),
            f"{name}_ratio_mean": float(masked_mean(error.exp(), mask)),
        }
    return metrics
