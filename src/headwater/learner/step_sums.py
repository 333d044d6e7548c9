"""The statistics of an optimiser step, and of all steps of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headwater.algorithms.diagnostics import (
    NUM_BINS,
    NUM_GAP_SUMS,
    count_ratios,
    effective_sample_size,
    gap_metrics,
    gap_sums,
    percentiles_of,
    weight_sums,
)
from headwater.algorithms.masked import masked_sum
from headwater.learner.ranks import Ranks

GAP = "rollout_gap/"
"""The metrics that compare the learner with the engine; they have this name whichever model they come from."""
FLOPS = "flops"
"""The operations of an update: forward and backward, without recomputed activations."""


def mean_stats(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimiser steps, each value over the steps that report it, and the number of steps.

    Skipped steps mostly report NaN and are left out of the means, unless all steps were skipped.
    """
    taken = [step for step in steps if not step["skipped_steps"]] or steps
    means = {}
    for name in dict.fromkeys(name for step in taken for name in step):
        values = [step[name] for step in taken if name in step]
        means[name] = sum(values) / len(values)
    skipped = sum(step["skipped_steps"] for step in steps)
    flops = {FLOPS: sum(step.get(FLOPS, 0.0) for step in steps)} if FLOPS in means else {}
    return {**means, **flops, "skipped_steps": skipped, "optimizer_steps": len(steps) - skipped}


class StepSums:
    """The statistics of one optimiser step, summed over its micro-batches on the device and finally over ranks."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._values: dict[str, Tensor] = {}
        self._weights = self._loss.new_zeros(3)
        self._ratios = self._loss.new_zeros(NUM_BINS)
        self._gap = self._loss.new_zeros(NUM_GAP_SUMS)
        self._largest_gap: Tensor | None = None
        self._flops = 0.0

    def add_loss(self, loss: Tensor) -> None:
        self._loss += loss.detach()

    @property
    def loss(self) -> Tensor:
        """The loss of this rank's rows so far, on the device."""
        return self._loss

    def add(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add per-token values, which are reported as means over the tokens of ``mask``."""
        count = mask.sum().double()
        for name, each in values.items():
            added = torch.stack([masked_sum(each.detach().double(), mask), count])
            self._values[name] = self._values[name] + added if name in self._values else added

    def add_weights(self, weights: Tensor, mask: Tensor) -> None:
        """Add importance weights of tokens, for the effective sample size."""
        self._weights += weight_sums(weights, mask)

    def add_ratios(self, log_ratio: Tensor, mask: Tensor) -> None:
        """Add log ratios of tokens, for their percentiles."""
        self._ratios += count_ratios(log_ratio, mask)

    def add_gap(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
        """Add log-probs of tokens beside those that the engine recorded, to compare the two."""
        sums, largest = gap_sums(logprobs, rollout_logprobs, mask)
        self._gap += sums
        self._largest_gap = largest if self._largest_gap is None else torch.maximum(self._largest_gap, largest)

    def add_flops(self, count: float) -> None:
        self._flops += count

    def statistics(self, ranks: Ranks, *, has_gap: bool = False) -> dict[str, float]:
        """The loss, means per token, and statistics of weights and ratios, over all ranks."""
        return self.read(ranks, [], has_gap=has_gap)[0]

    def read(
        self, ranks: Ranks, others: Sequence[Tensor], *, has_gap: bool = False
    ) -> tuple[dict[str, float], list[float]]:
        """The statistics, and ``others``, which are single numbers, in one transfer: the device is waited for once."""
        # A rank without rows in this step has no values, but takes part in the sum.
        names = ranks.union(self._values)
        nothing = self._loss.new_zeros(2)
        scalars = torch.cat([self._loss[None], *(self._values.get(name, nothing) for name in names)])
        flops = self._loss.new_full((1,), self._flops)
        sums = [scalars, self._weights, self._ratios, self._gap, flops]
        largest = self._gap.new_zeros(2) if self._largest_gap is None else self._largest_gap
        summed = ranks.sum(torch.cat(sums))
        extremes = ranks.largest(largest) if has_gap else largest
        numbers = torch.cat([summed, extremes, *(each.detach().double()[None] for each in others)]).cpu()
        lengths = [*(len(each) for each in sums), len(extremes), len(others)]
        scalars, weights, ratios, gap, flops, largest, rest = torch.split(numbers, lengths)
        loss, *of_tokens = scalars.tolist()
        means = {
            name: total / num_tokens if num_tokens else 0.0
            for name, total, num_tokens in zip(names, of_tokens[::2], of_tokens[1::2], strict=True)
        }
        count, total, squares = weights.tolist()
        weighed = {"effective_sample_size": effective_sample_size(count, total, squares)} if count else {}
        compared = {}
        if has_gap:
            compared = gap_metrics(gap, largest)
        statistics = {
            "loss": loss,
            **means,
            **weighed,
            **percentiles_of(ratios),
            **{f"{GAP}{name}": value for name, value in compared.items()},
            **({FLOPS: float(flops)} if flops else {}),
        }
        return statistics, rest.tolist()
