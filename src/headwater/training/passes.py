"""Going over a batch: epochs, mini-batches, and statistics over their optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from headwater.config.schema import TrainingConfig
from headwater.core.data_proto import DataProto


def minibatches(experience: DataProto, config: TrainingConfig) -> Iterator[DataProto]:
    """Every mini-batch of every epoch, in order. Samples of a prompt stand together and mostly stay so.

    There are as many as configured however few rows there are: ranks with different numbers of rows take their steps
    together.
    """
    cuts = [part * len(experience) // config.num_minibatches for part in range(config.num_minibatches + 1)]
    for _ in range(config.num_epochs):
        for start, end in pairwise(cuts):
            yield experience[start:end]


def mean_stats(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over optimiser steps, of each value over the steps that have it; and how many were taken or skipped."""
    means = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        means[name] = sum(values) / len(values)
    skipped = sum(step["skipped_steps"] for step in steps)
    return {**means, "skipped_steps": skipped, "optimizer_steps": len(steps) - skipped}
