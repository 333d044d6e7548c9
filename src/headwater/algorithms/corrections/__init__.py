"""Corrections for samples of an older policy, or of an engine with other numerics, one file each:
``f(inputs: CorrectionInputs, **settings) -> Correction``.

Every bound is on the ratio ``π_train / π_rollout``. A correction has no gradient. Its weights multiply the token
losses, and its mask replaces the loss mask. It is computed once per batch if the log-probs of the learner's policy are
recomputed. With ``algorithm.old_logprobs: rollout`` it is computed in every update, from the policy that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import Literal

import torch
from torch import Tensor

from headwater.algorithms.diagnostics import weight_metrics
from headwater.algorithms.masked import EPSILON, MAX_LOG_RATIO, bounded, check_shapes, keep, masked_mean, masked_sum
from headwater.config.arguments import checked, chosen_corrections, with_arguments
from headwater.config.schema import AlgorithmConfig
from headwater.core.errors import ConfigError
from headwater.core.registry import Registry

CORRECTIONS = Registry("correction", "headwater.algorithms.corrections", prepare=checked)

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionInputs:
    """All ``[samples, tokens]``."""

    old_logprobs: Tensor
    """Of the learner's policy: at the start of the step, or now if corrections are computed in every update."""
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
class Weighing:
    """How a correction has made weights of ratios. All tensors are ``[samples, tokens]``, 0 at masked tokens."""

    ratios: Tensor
    """Before the bounds."""
    low: float
    high: float
    level: Level
    bounded: Tensor
    """The weights within the bounds, before they are normalised."""
    normalize: bool
    """Whether the weights are divided by their mean over the batch."""

    def weights(self, mask: Tensor) -> Tensor:
        if not self.normalize:
            return self.bounded
        mean = self.mean(mask)
        return torch.where(mean > EPSILON, self.bounded / mean, self.bounded)

    def mean(self, mask: Tensor) -> Tensor:
        """The mean weight of tokens, or of sequences if each has one weight."""
        if self.level == "token":
            return masked_mean(self.bounded, mask)
        nonempty = (mask != 0).any(dim=-1)
        return masked_sum(masked_mean(self.bounded, mask, dim=-1), nonempty) / nonempty.sum().clamp(min=1)


@dataclass(frozen=True)
class Correction:
    weights: Tensor
    """``[samples, tokens]``: the factors of the token losses; 0 at tokens that do not count."""
    mask: Tensor
    """``[samples, tokens]``: the tokens that stay in the loss."""
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per token whose mean over the original mask is reported."""
    weighing: Weighing | None = None
    """Set by a correction that weighs by the ratio."""


CorrectionFunction = Callable[[CorrectionInputs], Correction]


def configured_corrections(algorithm: AlgorithmConfig) -> dict[str, CorrectionFunction]:
    """The corrections of a recipe with their arguments, by their names in metrics."""
    unknown = [name for name in algorithm.corrections_args if name not in algorithm.corrections]
    if unknown:
        reason = "algorithm.corrections does not name it; add it there, or remove this"
        raise ConfigError([f"algorithm.corrections_args.{name}: {reason}" for name in unknown])
    return {
        each.label: with_arguments(CORRECTIONS, each.name, each.arguments, each.key)
        for each in chosen_corrections(algorithm)
    }


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


def apply_corrections(
    functions: Mapping[str, CorrectionFunction], inputs: CorrectionInputs
) -> tuple[Correction, dict[str, float]]:
    """The corrections of a recipe (``configured_corrections``) combined, and the metrics of the batch."""
    corrections = {name: correct(inputs) for name, correct in functions.items()}
    combined = combine(corrections)
    means = {name: float(masked_mean(values, inputs.mask)) for name, values in combined.diagnostics.items()}
    metrics = means | correction_metrics(corrections, inputs.mask) | weight_metrics(combined.weights, inputs.mask)
    return combined, metrics


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


def correction_metrics(corrections: Mapping[str, Correction], mask: Tensor) -> dict[str, float]:
    """Metrics of whole batches, which are not means over tokens.

    The fractions of tokens, and of sequences with such a token, that all corrections together and each of those that
    remove tokens have removed; the range of what each of them measured; the range of the ratios that they weigh by, and
    their weights before they are normalised.
    """
    together = reduce(mul, (each.mask for each in corrections.values()))
    metrics = _rejected("", together, mask)
    for name, each in corrections.items():
        if "rejected_fraction" in each.diagnostics:
            metrics |= _rejected(f"{name}/", each.mask, mask)
        measured = each.diagnostics.get("measured")
        if measured is not None and (mask != 0).any():
            kept = measured[mask != 0]
            metrics |= {f"{name}/measured_max": float(kept.max()), f"{name}/measured_min": float(kept.min())}
        if each.weighing is not None and (mask != 0).any():
            metrics |= {f"{name}/{metric}": value for metric, value in weighing_metrics(each.weighing, mask).items()}
    return metrics


def weighing_metrics(given: Weighing, mask: Tensor) -> dict[str, float]:
    """The largest and smallest ratio before bounds, and the fractions of tokens (of sequences, if each has one ratio)
    and of the mean ratios of sequences that are above and below the bounds. A sequence without tokens has ratio 1.
    Then the statistics of the weights before they are normalised, and what normalising divides them by."""
    counted = given.ratios[mask != 0]
    if given.level != "token":
        counted = given.ratios.amax(dim=-1).masked_fill((mask == 0).all(dim=-1), 1.0)
    by_sequence = masked_mean(given.ratios, mask, dim=-1)
    metrics = {
        "ratio_max": counted.max(),
        "ratio_min": counted.min(),
        "ratio_high_fraction": (counted > given.high).float().mean(),
        "ratio_low_fraction": (counted < given.low).float().mean(),
        "sequence_ratio_high_fraction": (by_sequence > given.high).float().mean(),
        "sequence_ratio_low_fraction": (by_sequence < given.low).float().mean(),
    }
    if given.normalize:
        metrics["normalizer"] = given.mean(mask)
    return {name: float(value) for name, value in metrics.items()} | weight_metrics(given.bounded, mask)


def _rejected(prefix: str, kept: Tensor, mask: Tensor) -> dict[str, float]:
    rejected = (mask != 0) & (kept == 0)
    return {
        f"{prefix}rejected_fraction": float(masked_mean(rejected.to(mask.dtype), mask)),
        f"{prefix}rejected_sequence_fraction": float(rejected.any(dim=-1).to(mask.dtype).mean()),
    }
