"""Sums, means and deviations within groups: the samples of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The groups of a batch, in any order and of any sizes."""

    number: Tensor
    """``[samples]``: which group, from 0."""
    counts: Tensor
    """``[groups]``: how many samples."""

    @classmethod
    def of(cls, ids: Tensor) -> Groups:
        """From anything that is equal within a group."""
        _, number, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(number, counts)

    @property
    def size(self) -> Tensor:
        """``[samples]``: how many samples the own group has."""
        return self.counts[self.number]

    @property
    def single(self) -> Tensor:
        """``[samples]``: whether a sample is alone in its group."""
        return self.size == 1

    def sum(self, values: Tensor) -> Tensor:
        """``[samples, ...]``: the sum over the own group."""
        totals = values.new_zeros(len(self.counts), *values.shape[1:]).index_add_(0, self.number, values)
        return totals[self.number]

    def max(self, values: Tensor) -> Tensor:
        totals = values.new_zeros(len(self.counts)).scatter_reduce_(0, self.number, values, "amax", include_self=False)
        return totals[self.number]

    def min(self, values: Tensor) -> Tensor:
        return -self.max(-values)

    def centre(self, scores: Tensor) -> Tensor:
        """Scores minus their group's mean; a sample that is alone keeps its score.

        Equal scores give exactly 0: counted from the group's lowest score they are 0 before any rounding happens.
        """
        above = scores - self.min(scores)
        return torch.where(self.single, scores, above - self.sum(above) / self.size)

    def std(self, scores: Tensor) -> Tensor:
        """The unbiased deviation within the group; 1 for a sample that is alone."""
        centred = self.centre(scores)
        variance = self.sum(centred.square()) / (self.size - 1).clamp(min=1)
        return torch.where(self.single, torch.ones_like(variance), variance.sqrt())
