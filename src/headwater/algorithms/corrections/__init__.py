"""Corrections for samples of an older policy, or of an engine with other numerics, one file each:
``f(inputs: CorrectionInputs, **settings) -> Correction``.

Every bound is on the ratio ``π_train / π_rollout``. A correction has no gradient, so it is computed once per batch. Its
weights multiply the token losses, and its mask replaces the loss mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Literal

import torch
from torch import Tensor

from headwater.algorithms.masked import EPSILON, MAX_LOG_RATIO, bounded, check_shapes, keep, masked_mean, masked_sum
from headwater.config.arguments import checked
from headwater.core.registry import Registry

CORRECTIONS = Registry("correction", "headwater.algorithms.corrections", prepare=checked)

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionInputs:
    """All ``[samples, tokens]``."""

    old_logprobs: Tensor
    """Of the learner's policy at the start of the step: the proximal policy."""
    rollout_logprobs: Tensor
    """Of the policy that sampled, as the engine recorded them."""
    mask: Tensor

    def __post_init__(self) -> None:
        check_shapes(tuple(self.mask.shape), old=self.old_logprobs, rollout=self.rollout_logprobs)

    @property
    def log_ratio(self) -> Tensor:
        """``log π_train / π_rollout``, 0 at masked tokens, without gradient."""
        return keep(self.old_logprobs - self.rollout_logprobs, self.mask).detach()


@dataclass(frozen=True)
class Correction:
    weights: Tensor
    """``[samples, tokens]``: the factors of the token losses; 0 at tokens that do not count."""
    mask: Tensor
    """``[samples, tokens]``: the tokens that stay in the loss."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per token whose mean over the original mask is reported."""


def ratios(log_ratio: Tensor, mask: Tensor, level: Level, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """The ratio of each token, or that of its sequence: the product of the token ratios, or their geometric mean.

    The logarithm of the result is within ``±limit``.
    """
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(mask)
    elif level == "geometric":
        means = log_ratio.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
        log_ratio = means.expand_as(mask)
    return keep(bounded(log_ratio, limit).exp(), mask)


def combine(corrections: Mapping[str, Correction]) -> Correction:
    """Combine corrections of the same batch: weights are multiplied, and a token must be kept by all.

    Diagnostics are named ``<correction>/<diagnostic>``.
    """
    return Correction(
        reduce(mul, (each.weights for each in corrections.values())),
        reduce(mul, (each.mask for each in corrections.values())),
        {
            f"{name}/{diagnostic}": values
            for name, each in corrections.items()
            for diagnostic, values in each.diagnostics.items()
        },
    )


def batch_normalize(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    """Weights divided by their mean, which is over tokens, or over sequences if each has one weight."""
    mean = mean_weight(weights, mask, level)
    return torch.where(mean > EPSILON, weights / mean, weights)


def mean_weight(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        return masked_mean(weights, mask)
    nonempty = (mask != 0).any(dim=-1)
    return masked_sum(masked_mean(weights, mask, dim=-1), nonempty) / nonempty.sum().clamp(min=1)
