"""Tensors under a mask: statistics over the kept entries, the loss of a step, bounded log ratios, checks of columns.

Entries that a mask drops may be NaN or infinite without an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from headwater.config.constraints import MoreThan
from headwater.core.errors import MissingColumn, UnknownName
from headwater.core.registry import nearest

EPSILON = 1e-8

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
"""How the losses of tokens are combined into the loss of an optimiser step."""

ROW_MEAN = "row-mean"
"""The aggregation of a loss that averages over all rows, including those without a trained token: ``geo_mean``."""

MAX_LOG_RATIO = 20.0
"""The usual limit of a log ratio of two policies. Without a limit, a single extreme token can overflow."""

LogRatioLimit = Annotated[float, MoreThan(0)] | None
"""The argument ``max_log_ratio`` of an algorithm: log ratios are clamped to ± this value. None does not clamp them.

The default of each algorithm is what verl or AReaL does.
"""


def bounded(log_ratio: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """A log ratio within ``±limit``, which is safe to exponentiate."""
    return log_ratio if limit is None else log_ratio.clamp(-limit, limit)


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


@dataclass(frozen=True)
class StepTotals:
    """The counts that a loss is divided by, over the whole optimiser step: all micro-batches of all ranks."""

    num_tokens: float
    num_sequences: float
    """Sequences with at least one trained token. The pieces of an episode together count as one."""
    width: float
    """The length that ``seq-mean-token-sum-norm`` divides by; keep it constant over a run."""
    data_parallel_size: int = 1
    """The number of ranks. Gradients are averaged over them afterwards, so each loss is multiplied by it."""
    num_rows: float | None = None
    """All sequences, including those without a trained token. None, also if episodes have pieces: ``num_sequences``."""

    @classmethod
    def of(
        cls,
        mask: Tensor,
        *,
        sequence_weights: Tensor | None = None,
        width: float | None = None,
        data_parallel_size: int = 1,
    ) -> StepTotals:
        """The totals of a step with this mask; ``width`` defaults to that of the mask."""
        num_sequences = float(count_sequences(mask, sequence_weights))
        num_rows = float(len(mask)) if sequence_weights is None else None
        return cls(float(mask.sum()), num_sequences, width or mask.shape[-1], data_parallel_size, num_rows)


def count_sequences(mask: Tensor, sequence_weights: Tensor | None = None) -> Tensor:
    """The number of sequences with a trained token, or the sum of their weights ``[samples]``."""
    trained = (mask != 0).any(dim=-1)
    return trained.sum() if sequence_weights is None else sequence_weights[trained].sum()


def aggregate(
    token_losses: Tensor, mask: Tensor, mode: str, totals: StepTotals, sequence_weights: Tensor | None = None
) -> Tensor:
    """The share of one micro-batch in the loss of the step; the shares of all micro-batches add up to that loss.

    ``sequence_weights`` ``[samples]`` are the weights of sequences in a mean over sequences, 1 by default; see
    ``piece_weights``. ``seq-mean-token-mean`` divides by the length of each sequence, so a sequence must not be split.
    """
    dp = totals.data_parallel_size
    if sequence_weights is not None and mode.startswith(("seq-mean", ROW_MEAN)):
        token_losses = token_losses * sequence_weights[:, None]
    if mode == "token-mean":
        return masked_sum(token_losses, mask) / totals.num_tokens * dp
    if mode == "token-sum":
        return masked_sum(token_losses, mask) * dp
    if mode == "seq-mean-token-sum":
        return masked_sum(token_losses, mask) / totals.num_sequences * dp
    if mode == "seq-mean-token-sum-norm":
        return masked_sum(token_losses, mask) / (totals.num_sequences * totals.width) * dp
    if mode in ("seq-mean-token-mean", ROW_MEAN):
        means = masked_sum(token_losses, mask, dim=-1) / (mask.sum(dim=-1) + EPSILON)
        num_rows = totals.num_rows if mode == ROW_MEAN else None
        return means.sum() / (totals.num_sequences if num_rows is None else num_rows) * dp
    raise UnknownName(f"unknown aggregation {mode!r}; {nearest(mode, list(get_args(Aggregation)))}")


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
