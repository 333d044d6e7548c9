"""From per-token losses to one number, so that splitting a batch never changes the gradient."""

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
    """What a loss is averaged over: the **whole** optimiser step, all micro-batches of all ranks."""

    num_tokens: float
    num_sequences: float
    """Sequences with at least one trained token."""
    width: float
    """What ``seq-mean-token-sum-norm`` divides a sequence's sum by; keep it constant over a run."""
    data_parallel_size: int = 1
    """Gradients are averaged over so many ranks afterwards, so each rank's loss is multiplied by it."""

    @classmethod
    def of(cls, mask: Tensor, *, width: float | None = None, data_parallel_size: int = 1) -> StepTotals:
        """Of a step whose mask is all here; ``width`` defaults to the mask's."""
        return cls(float(mask.sum()), float((mask != 0).any(dim=-1).sum()), width or mask.shape[-1], data_parallel_size)


def aggregate(token_losses: Tensor, mask: Tensor, mode: str, totals: StepTotals) -> Tensor:
    """One micro-batch's share of the step's loss: the shares of all micro-batches add up to the loss of the whole.

    A sequence's share is divided by its own length in ``seq-mean-token-mean``, so a sequence must not be cut in two.
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
