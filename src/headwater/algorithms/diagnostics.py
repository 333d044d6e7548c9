"""Metrics that show whether a step is healthy. None of them affects training.

Percentiles of importance ratios can be counted in parts: the counts of micro-batches and ranks add up. Sorting all
tokens of a step would require gathering them from all ranks; fixed bins do not, and stay on the device until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.algorithms.masked import EPSILON, MAX_LOG_RATIO, bounded, keep, masked_mean, masked_sum

PERCENTILES = (1, 10, 50, 90, 99)

# Bins are even in asinh(log ratio / FINE): FINE * STEP wide around a ratio of 1, where most tokens are, and
# proportional to the log ratio further out, so that the error of a bin's middle is at most half a per cent.
_FINE = 1e-3
_STEP = 0.01
_REACH = math.ceil(math.asinh(MAX_LOG_RATIO / _FINE) / _STEP)
NUM_BINS = 2 * _REACH + 1


def offpolicy_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """The distance of the training policy from the one that sampled: KL, perplexities, chi-squared.

    ``kl`` estimates KL(rollout ‖ training), and ``k3_kl`` does so with less variance. The ``chi2`` values are
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


def gap_sums(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``[11]`` sums and ``[2]`` maxima over the kept tokens, for ``gap_metrics``. Those of parts add up."""
    mine, theirs = (keep(each.detach().double(), mask) for each in (logprobs, rollout_logprobs))
    log_ratio = bounded(mine - theirs)
    p, q = (keep(each.exp(), mask) for each in (mine, theirs))
    apart, moved = log_ratio.abs(), (p - q).abs()
    k3 = log_ratio.exp() - log_ratio - 1
    terms = (apart, apart.square(), -log_ratio, k3, moved, moved.square(), p, q, p.square(), q.square(), p * q)
    sums = torch.stack([(mask != 0).sum().double(), *(each.sum() for each in terms)])
    largest = torch.stack([apart.max(), moved.max()]) if apart.numel() else sums.new_zeros(2)
    return sums, largest


NUM_GAP_SUMS = 12


def gap_metrics(sums: Tensor, largest: Tensor) -> dict[str, float]:
    """How far the learner's log-probs and probabilities of sampled tokens are from the engine's; empty without tokens.

    With equal weights, the difference is that of two programs and their number types.
    """
    count, *rest = sums.tolist()
    if not count:
        return {}
    apart, apart2, kl, k3, moved, moved2, p, q, p2, q2, pq = (each / count for each in rest)
    spread = math.sqrt(max(0.0, p2 - p * p)) * math.sqrt(max(0.0, q2 - q * q))
    return {
        "tokens": count,
        "logprob_abs_mean": apart,
        "logprob_abs_std": math.sqrt(max(0.0, apart2 - apart**2)),
        "logprob_abs_max": float(largest[0]),
        "prob_abs_mean": moved,
        "prob_abs_std": math.sqrt(max(0.0, moved2 - moved**2)),
        "prob_abs_max": float(largest[1]),
        "kl": kl,
        "k3_kl": k3,
        **({"prob_correlation": (pq - p * q) / spread} if spread > EPSILON**2 else {}),
    }


def token_statistics(values: Tensor, mask: Tensor) -> dict[str, float]:
    """``mean``, ``std``, ``min`` and ``max`` over the kept tokens; empty if there are none."""
    kept = values[mask != 0].double()
    if not kept.numel():
        return {}
    std, mean = torch.std_mean(kept, correction=0)
    lowest, highest = kept.aminmax()
    return {"mean": float(mean), "std": float(std), "min": float(lowest), "max": float(highest)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """The share of the variance of returns that a critic explains: 1 is perfect, 0 is as good as a constant."""
    kept, of = values[mask != 0].double(), returns[mask != 0].double()
    if not kept.numel():
        return 0.0
    return float(1 - (of - kept).var(correction=0) / (of.var(correction=0) + 1e-5))


def weight_metrics(weights: Tensor, mask: Tensor) -> dict[str, float]:
    """Statistics of the weights of corrections, over the kept tokens and over the means of sequences.

    Empty if no token is kept.
    """
    count, total, squares = weight_sums(weights, mask).tolist()
    if count == 0:
        return {}
    mean, shown = total / count, weights[mask != 0]
    by_sequence = masked_mean(weights, mask, dim=-1)[(mask != 0).any(dim=-1)]
    return {
        "effective_sample_size": effective_sample_size(count, total, squares),
        "weight_mean": mean,
        "weight_std": math.sqrt(max(0.0, squares / count - mean**2)),
        "weight_max": float(shown.max()),
        "weight_min": float(shown.min()),
        "sequence_weight_mean": float(by_sequence.mean()),
        "sequence_weight_std": float(by_sequence.std()) if len(by_sequence) > 1 else 0.0,
        "sequence_weight_max": float(by_sequence.max()),
        "sequence_weight_min": float(by_sequence.min()),
        "sequence_weight_max_deviation": float((by_sequence - 1).abs().max()),
    }


def ratio_percentiles(log_ratio: Tensor, mask: Tensor, percentiles: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """Percentiles of the importance ratio over the kept tokens."""
    ratio = bounded(log_ratio[mask != 0]).exp().float()
    if ratio.numel() == 0:
        return {}
    ordered = ratio.sort().values
    return {f"ratio_p{each:02d}": float(ordered[round((len(ordered) - 1) * each / 100)]) for each in percentiles}


def staleness_histogram(versions: Tensor, mask: Tensor, current_version: int) -> dict[int, int]:
    """The number of trained tokens by their lag in versions; tokens that were not sampled are not counted."""
    lags, counts = torch.unique(current_version - versions[(mask != 0) & (versions >= 0)], return_counts=True)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))


def weight_sums(weights: Tensor, mask: Tensor) -> Tensor:
    """``[3]``: the number of kept weights, their sum, and the sum of their squares. The sums of parts add up."""
    kept = weights.detach().double()
    return torch.stack([(mask != 0).sum().double(), masked_sum(kept, mask), masked_sum(kept.square(), mask)])


def effective_sample_size(count: float, total: float, squares: float) -> float:
    """``mean(w)² / mean(w²)`` from ``weight_sums``: the effective share of the batch.

    1 if all weights are equal, 0 if all are 0.
    """
    return total**2 / (count * squares) if squares else 0.0


def count_ratios(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """``[NUM_BINS]``: the number of kept tokens whose log ratio is in each bin. NaN is not counted."""
    counted = (mask != 0) & ~log_ratio.isnan()
    kept = bounded(log_ratio.detach().masked_fill(~counted, 0.0))
    bins = ((kept / _FINE).asinh() / _STEP).round().long() + _REACH
    counts = torch.zeros(NUM_BINS, dtype=torch.float64, device=log_ratio.device)
    # bincount would wait for the device to find the number of bins.
    return counts.index_add_(0, bins.flatten(), counted.flatten().double())


def percentiles_of(counts: Tensor) -> dict[str, float]:
    """``ratio_p01`` to ``ratio_p99``: percentiles of the ratio over the counted tokens."""
    ends = counts.cumsum(dim=0)
    num_tokens = int(ends[-1])
    if num_tokens == 0:
        return {}
    ranks = torch.tensor([round((num_tokens - 1) * each / 100) for each in PERCENTILES], dtype=ends.dtype)
    bins = torch.searchsorted(ends, ranks.to(ends.device), right=True).tolist()
    return {f"ratio_p{each:02d}": _middle(number) for each, number in zip(PERCENTILES, bins, strict=True)}


def _middle(number: int) -> float:
    return math.exp(_FINE * math.sinh((number - _REACH) * _STEP))
