"""Statistics over the entries a mask keeps."""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-8


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum where ``mask`` is 1. Masked entries may be NaN or infinite without harm."""
    kept = values.masked_fill(mask == 0, 0.0)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where ``mask`` is 1; 0 where it keeps nothing."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / (count + EPSILON)
