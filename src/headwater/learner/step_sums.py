"""What one optimiser step reports, summed over its micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.algorithms.diagnostics import NUM_BINS, count_ratios, effective_sample_size, percentiles_of, weight_sums
from headwater.algorithms.masked import masked_sum
from headwater.learner.ranks import Ranks


class StepSums:
    """Only sums, which may be added in any order, and which stay on the device until the step is done."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._num_tokens = torch.zeros_like(self._loss)
        self._values: dict[str, Tensor] = {}
        self._weights = self._loss.new_zeros(3)
        self._ratios = self._loss.new_zeros(NUM_BINS)

    def add_loss(self, loss: Tensor) -> None:
        self._loss += loss.detach()

    def add(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Per-token values, for means."""
        self._num_tokens += mask.sum()
        for name, each in values.items():
            total = masked_sum(each.detach().double(), mask)
            self._values[name] = self._values[name] + total if name in self._values else total

    def add_weights(self, weights: Tensor, mask: Tensor) -> None:
        """Weights of tokens, for their effective sample size."""
        self._weights += weight_sums(weights, mask)

    def add_ratios(self, log_ratio: Tensor, mask: Tensor) -> None:
        """Log ratios of tokens, for their percentiles."""
        self._ratios += count_ratios(log_ratio, mask)

    def statistics(self, ranks: Ranks) -> dict[str, float]:
        """The loss, means per token, and what there is of the weights and ratios; over all ranks."""
        # A rank that only kept the others company has no values of its own.
        names = ranks.union(self._values)
        nothing = torch.zeros_like(self._loss)
        scalars = torch.stack([self._loss, self._num_tokens, *(self._values.get(name, nothing) for name in names)])
        summed = ranks.sum(torch.cat([scalars, self._weights, self._ratios])).cpu()
        scalars, weights, ratios = torch.split(summed, [len(scalars), len(self._weights), NUM_BINS])
        loss, num_tokens, *totals = scalars.tolist()
        means = {name: total / num_tokens for name, total in zip(names, totals, strict=True)}
        count, total, squares = weights.tolist()
        weighed = {"effective_sample_size": effective_sample_size(count, total, squares)} if count else {}
        return {"loss": loss, **means, **weighed, **percentiles_of(ratios)}
