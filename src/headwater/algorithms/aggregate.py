"""Combines token losses into one loss, independently of how a batch is split into micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from headwater.algorithms.masked import EPSILON, masked_sum
from headwater.core.errors import UnknownName
from headwater.core.registry import nearest

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@dataclass(frozen=True)
class StepTotals:
    """The counts that a loss is divided by, over the whole optimiser step: all micro-batches of all ranks."""

    num_tokens: float
    num_sequences: float
    """Sequences with at least one trained token."""
    width: float
    """The length that ``seq-mean-token-sum-norm`` divides by; keep it constant over a run."""
    data_parallel_size: int = 1
    """The number of ranks. Gradients are averaged over them afterwards, so each loss is multiplied by it."""

    @classmethod
    def of(cls, mask: Tensor, *, width: float | None = None, data_parallel_size: int = 1) -> StepTotals:
        """The totals of a step with this mask; ``width`` defaults to that of the mask."""
        return cls(float(mask.sum()), float((mask != 0).any(dim=-1).sum()), width or mask.shape[-1], data_parallel_size)


def aggregate(token_losses: Tensor, mask: Tensor, mode: str, totals: StepTotals) -> Tensor:
    """The share of one micro-batch in the loss of the step; the shares of all micro-batches add up to that loss.

    ``seq-mean-token-mean`` divides by the length of each sequence, so a sequence must not be split.
    """
    dp = totals.data_parallel_size
    if mode == "token-mean":
        return masked_sum(token_losses, mask) / totals.num_tokens * dp
    if mode == "token-sum":
        return masked_sum(token_losses, mask) * dp
    if mode == "seq-mean-token-sum":
        return masked_sum(token_losses, mask) / totals.num_sequences * dp
    if mode == "seq-mean-token-sum-norm":
        return masked_sum(token_losses, mask) / (totals.num_sequences * totals.width) * dp
    if mode == "seq-mean-token-mean":
        means = masked_sum(token_losses, mask, dim=-1) / (mask.sum(dim=-1) + EPSILON)
        return means.sum() / totals.num_sequences * dp
    raise UnknownName(f"unknown aggregation {mode!r}; {nearest(mode, list(get_args(Aggregation)))}")
