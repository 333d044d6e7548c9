"""Sums, means and deviations within groups: the episodes of one prompt.

An episode may consist of several samples (pieces). Every episode has weight one in its group, shared equally by its
pieces, so cutting an episode into pieces does not change the statistics of its group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The groups of a batch, in any order and of any size."""

    number: Tensor
    """``[samples]``: the group of each sample, from 0."""
    counts: Tensor
    """``[groups]``: the number of episodes."""
    episodes: Episodes | None = None
    """The pieces of episodes; None if every sample is a whole episode."""

    @classmethod
    def of(cls, ids: Tensor, episodes: Tensor | None = None) -> Groups:
        """``ids`` are equal within a group and ``episodes`` within an episode; by default each sample is an episode."""
        _, number, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        found = None if episodes is None else Episodes.of(episodes)
        if found is None:
            return cls(number, counts)
        return cls(number, torch.bincount(number[found.first], minlength=len(counts)), found)

    @property
    def size(self) -> Tensor:
        """``[samples]``: the number of episodes in the sample's group."""
        return self.counts[self.number]

    @property
    def single(self) -> Tensor:
        """``[samples]``: whether the sample's episode is the only one in its group."""
        return self.size == 1

    def sum(self, values: Tensor) -> Tensor:
        """``[samples, ...]``: the sum over the episodes of the sample's group; an episode is the mean of its pieces."""
        number = self.number if self.episodes is None else self.number[self.episodes.first]
        totals = values.new_zeros(len(self.counts), *values.shape[1:]).index_add_(0, number, self.per_episode(values))
        return totals[self.number]

    def max(self, values: Tensor) -> Tensor:
        totals = values.new_zeros(len(self.counts)).scatter_reduce_(0, self.number, values, "amax", include_self=False)
        return totals[self.number]

    def min(self, values: Tensor) -> Tensor:
        return -self.max(-values)

    def per_episode(self, values: Tensor) -> Tensor:
        """``[episodes, ...]``: the mean over the pieces of each episode, in the order of the first pieces."""
        return values if self.episodes is None else self.episodes.mean(values)

    def of_episode(self, values: Tensor) -> Tensor:
        """``[samples, ...]``: the mean over the pieces of the sample's episode."""
        return values if self.episodes is None else self.episodes.mean(values)[self.episodes.number]

    def total_of_episode(self, values: Tensor) -> Tensor:
        """``[samples]``: the sum over the pieces of the sample's episode."""
        return values if self.episodes is None else self.episodes.total(values)[self.episodes.number]

    def max_of_episode(self, values: Tensor) -> Tensor:
        """``[samples]``: the maximum over the pieces of the sample's episode."""
        return values if self.episodes is None else self.episodes.max(values)[self.episodes.number]

    def centre(self, scores: Tensor) -> Tensor:
        """Scores minus the mean of their group; a sample whose episode is alone keeps its score.

        Equal scores give exactly 0: relative to the lowest score of the group they are 0 before any rounding.
        """
        above = scores - self.min(scores)
        return torch.where(self.single, scores, above - self.sum(above) / self.size)

    def std(self, scores: Tensor) -> Tensor:
        """The unbiased standard deviation within the group; 1 for an episode that is alone."""
        centred = self.centre(scores)
        variance = self.sum(centred.square()) / (self.size - 1).clamp(min=1)
        return torch.where(self.single, torch.ones_like(variance), variance.sqrt())


def piece_weights(episodes: Tensor, mask: Tensor) -> Tensor | None:
    """``[samples]``: one divided by the number of pieces of the sample's episode; None if every sample is an episode.

    Pieces without a trained token in ``mask`` are not counted, so the trained pieces of an episode have weight one
    together.
    """
    found = Episodes.of(episodes)
    if found is None:
        return None
    trained = (mask != 0).any(dim=-1).float()
    return 1 / found.total(trained).clamp(min=1)[found.number]


@dataclass(frozen=True)
class Episodes:
    """Which samples are pieces of the same episode. Episodes are numbered in the order of their first pieces."""

    number: Tensor
    """``[samples]``: the episode of each sample, from 0."""
    first: Tensor
    """``[episodes]``: the first sample of each episode."""
    counts: Tensor
    """``[episodes]``: the number of pieces."""

    @classmethod
    def of(cls, ids: Tensor) -> Episodes | None:
        """From anything that is equal within an episode; None if no episode has more than one piece."""
        _, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        if len(counts) == len(ids):
            return None
        rows = torch.arange(len(ids), device=ids.device)
        first = torch.full_like(counts, len(ids)).scatter_reduce_(0, inverse, rows, "amin")
        order = first.argsort()
        return cls(order.argsort()[inverse], first[order], counts[order])

    def total(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(self.counts), *values.shape[1:]).index_add_(0, self.number, values)

    def max(self, values: Tensor) -> Tensor:
        totals = values.new_zeros(len(self.counts), *values.shape[1:])
        index = self.number.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
        return totals.scatter_reduce_(0, index, values, "amax", include_self=False)

    def mean(self, values: Tensor) -> Tensor:
        """Pieces with equal values give exactly that value: the mean is computed relative to the first piece."""
        first = values[self.first]
        counts = self.counts.reshape(-1, *[1] * (values.dim() - 1))
        offset = self.total(values - first[self.number])
        return first + (offset / counts if values.is_floating_point() else offset // counts)
