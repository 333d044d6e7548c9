"""Tensors under a mask: statistics over the kept entries, bounded log ratios, and checks of columns.

Entries that a mask drops may be NaN or infinite without an effect.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.core.errors import MissingColumn

EPSILON = 1e-8

MAX_LOG_RATIO = 20.0
"""The largest log ratio of two policies. Without a bound, a single extreme token would overflow."""


def bounded(log_ratio: Tensor) -> Tensor:
    """A log ratio that is safe to exponentiate."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with 0 where ``mask`` is 0. Unlike a product, this also removes NaN, in the gradient as well."""
    return values.masked_fill(mask == 0, 0.0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    kept = keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean over kept entries; 0 if there are none."""
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(values, mask, dim) / (count + EPSILON)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row over its kept entries, expanded to all of its entries."""
    count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return (keep(values, mask).sum(dim=-1, keepdim=True) / count).expand_as(values)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance; 0 if fewer than two entries are kept."""
    count = mask.sum()
    biased = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return biased * count / (count - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit variance over the kept entries, 0 at the others.

    Equal entries give exactly 0. The mean is clamped to their range, because a rounding error in it would be divided by
    a tiny deviation.
    """
    if not values.numel():
        return values
    dropped = mask == 0
    lowest, highest = values.masked_fill(dropped, torch.inf).min(), values.masked_fill(dropped, -torch.inf).max()
    mean = masked_mean(values, mask).clamp(lowest, highest)
    return keep((values - mean) * (masked_var(values, mask) + EPSILON).rsqrt(), mask)


def require(value: Tensor | None, column: str, needed_by: str, remedy: str) -> Tensor:
    """``value``, or an error that names the column, what needs it and what provides it."""
    if value is None:
        raise MissingColumn(f"{needed_by} needs the column {column!r}, which the batch does not have; {remedy}")
    return value


def required(columns: Mapping[str, Tensor], column: str, needed_by: str, remedy: str) -> Tensor:
    """A column of a batch, or the error of ``require``."""
    return require(columns.get(column, None), column, needed_by, remedy)


def check_shapes(shape: tuple[int, ...], **columns: Tensor | None) -> None:
    """Raise an error unless every given column has ``shape``."""
    for name, value in columns.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the mask {shape}")
