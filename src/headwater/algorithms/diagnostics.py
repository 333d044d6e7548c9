"""Numbers that say whether a step was healthy. None of them changes training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.algorithms.corrections import Level, ratios
from headwater.algorithms.log_ratio import bounded
from headwater.algorithms.masked import keep, masked_mean
from headwater.algorithms.ratio_histogram import PERCENTILES
from headwater.algorithms.weights import effective_sample_size


def offpolicy_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the training policy is from the one that sampled: KL, perplexities, chi-squared.

    ``kl`` estimates KL(rollout ‖ training); ``k3_kl`` does so with less noise. The ``chi2`` values are
    ``mean(ratio²) - 1``: the variance that importance weights would have.
    """
    old_logprobs, rollout_logprobs = keep(old_logprobs, mask), keep(rollout_logprobs, mask)
    log_ratio = old_logprobs - rollout_logprobs
    training, rollout = (-masked_mean(each, mask, dim=-1) for each in (old_logprobs, rollout_logprobs))
    gap = training - rollout
    sequence_ratio = bounded(log_ratio.sum(dim=-1))
    token_ratio = bounded(log_ratio)
    metrics = {
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": masked_mean((2 * token_ratio).exp(), mask) - 1,
        "chi2_seq": (2 * sequence_ratio).exp().mean() - 1,
    }
    return {name: float(value) for name, value in metrics.items()}


def weight_metrics(
    log_ratio: Tensor, weights: Tensor, mask: Tensor, *, level: Level, lower: float | None, upper: float
) -> dict[str, float]:
    """The importance ratios of a batch, and the ``weights`` that a correction made of them.

    The fractions are of ratios before the correction. Where a sequence has one ratio, ``max`` and ``min`` are the
    ratios' and all is counted by sequence; else they are the weights'. Without a ``lower`` bound it is ``1/upper``.
    """
    low = 1 / upper if lower is None else lower
    ratio = ratios(keep(log_ratio, mask), mask, level)
    per_sequence, raw_per_sequence = masked_mean(weights, mask, dim=-1), masked_mean(ratio, mask, dim=-1)
    counted, shown = ratio[mask != 0], weights[mask != 0]
    if level != "token":
        # A sequence without tokens has ratio 1.
        counted = shown = ratio.amax(dim=-1) + (mask == 0).all(dim=-1)
    variance = masked_mean(weights.square(), mask) - masked_mean(weights, mask).square()
    metrics = {
        "max": shown.max(),
        "min": shown.min(),
        "mean": masked_mean(weights, mask),
        "std": variance.clamp(min=0).sqrt(),
        "effective_sample_size": effective_sample_size(weights, mask),
        "fraction_high": (counted > upper).float().mean(),
        "fraction_low": (counted < low).float().mean(),
        "sequence_mean": per_sequence.mean(),
        "sequence_std": per_sequence.std() if len(per_sequence) > 1 else torch.zeros(()),
        "sequence_max": per_sequence.max(),
        "sequence_min": per_sequence.min(),
        "sequence_max_deviation": (per_sequence - 1).abs().max(),
        "sequence_fraction_high": (raw_per_sequence > upper).float().mean(),
        "sequence_fraction_low": (raw_per_sequence < low).float().mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def ratio_percentiles(log_ratio: Tensor, mask: Tensor, percentiles: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """The importance ratio below which so many per cent of the kept tokens lie."""
    ratio = bounded(log_ratio[mask != 0]).exp().float()
    if ratio.numel() == 0:
        return {}
    ordered = ratio.sort().values
    return {f"ratio_p{each:02d}": float(ordered[round((len(ordered) - 1) * each / 100)]) for each in percentiles}


def staleness_histogram(versions: Tensor, mask: Tensor, current_version: int) -> dict[int, int]:
    """How many trained tokens lag so many versions behind; tokens that were not sampled are left out."""
    sampled = versions[(mask != 0) & (versions >= 0)]
    return dict(sorted(Counter((current_version - sampled).tolist()).items()))
