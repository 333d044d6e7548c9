"""Statistics over the entries a mask keeps. Entries it drops may be NaN or infinite without harm."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with 0 where ``mask`` is 0; unlike a product this also removes NaN, from the gradient too."""
    return values.masked_fill(mask == 0, 0.0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    kept = keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where ``mask`` is 1; 0 where it keeps nothing."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / (count + EPSILON)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Each row's mean over its kept entries, on all of its entries."""
    count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return (keep(values, mask).sum(dim=-1, keepdim=True) / count).expand_as(values)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance; 0 where the mask keeps fewer than two entries."""
    count = mask.sum()
    biased = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return biased * count / (count - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Zero mean and unit variance over the kept entries, 0 at the others. ``shift_mean=False`` adds the mean back.

    Equal entries give exactly 0: rounding must not take their mean off them, to be magnified by so small a deviation.
    """
    if not values.numel():
        return values
    dropped = mask == 0
    lowest, highest = values.masked_fill(dropped, torch.inf).min(), values.masked_fill(dropped, -torch.inf).max()
    mean = masked_mean(values, mask).clamp(lowest, highest)
    whitened = (values - mean) * (masked_var(values, mask) + EPSILON).rsqrt()
    return keep(whitened if shift_mean else whitened + mean, mask)
