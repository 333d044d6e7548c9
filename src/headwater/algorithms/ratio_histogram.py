"""Percentiles of importance ratios that may be counted in parts: counts of micro-batches and ranks add up.

Percentiles of parts do not make a percentile of the whole, and keeping every token of a step to sort them would mean
gathering them from all ranks. Fixed bins need neither, and nothing leaves the device until a step is done.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.algorithms.log_ratio import MAX_LOG_RATIO, bounded

PERCENTILES = (1, 10, 50, 90, 99)

# Bins are even in asinh(log ratio / FINE): as narrow as FINE * STEP around a ratio of 1, where an update lives, and in
# proportion to the log ratio further out, so that a bin's middle is never off by more than half a per cent of it.
_FINE = 1e-3
_STEP = 0.01
_REACH = math.ceil(math.asinh(MAX_LOG_RATIO / _FINE) / _STEP)
NUM_BINS = 2 * _REACH + 1


def count_ratios(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """``[NUM_BINS]``: how many kept tokens have their log ratio in each bin. One that is NaN is in none."""
    counted = (mask != 0) & ~log_ratio.isnan()
    kept = bounded(log_ratio.detach().masked_fill(~counted, 0.0))
    bins = ((kept / _FINE).asinh() / _STEP).round().long() + _REACH
    counts = torch.zeros(NUM_BINS, dtype=torch.float64, device=log_ratio.device)
    # Not bincount, which waits for the device to learn how many bins there are.
    return counts.index_add_(0, bins.flatten(), counted.flatten().double())


def percentiles_of(counts: Tensor) -> dict[str, float]:
    """``ratio_p01`` to ``ratio_p99``: the ratio below which so many per cent of the counted tokens lie."""
    ends = counts.cumsum(dim=0)
    num_tokens = int(ends[-1])
    if num_tokens == 0:
        return {}
    ranks = torch.tensor([round((num_tokens - 1) * each / 100) for each in PERCENTILES], dtype=ends.dtype)
    bins = torch.searchsorted(ends, ranks.to(ends.device), right=True).tolist()
    return {f"ratio_p{each:02d}": _middle(number) for each, number in zip(PERCENTILES, bins, strict=True)}


def _middle(number: int) -> float:
    return math.exp(_FINE * math.sinh((number - _REACH) * _STEP))
