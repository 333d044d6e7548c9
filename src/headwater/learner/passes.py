"""Going over a batch: epochs, mini-batches, and statistics over their optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from headwater.config.schema import LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError

MINIBATCH = "minibatch"
"""The column that says which mini-batch of the whole batch a row belongs to; a batch shared out over ranks has it."""
NUM_MINIBATCHES = "num_minibatches"
"""How many mini-batches those are, in ``meta_info``: a rank may hold no row of some."""


def minibatch_rows(num_rows: int, num_minibatches: int) -> list[range]:
    """The rows of each mini-batch. Samples of a prompt stand together and mostly stay so."""
    cuts = [part * num_rows // num_minibatches for part in range(num_minibatches + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


def minibatches(experience: DataProto, config: LearnerConfig) -> Iterator[DataProto]:
    """Every mini-batch of every epoch, in order: of a batch shared out over ranks, this rank's rows of each.

    There are as many as configured however few rows there are, and some may be empty: ranks with different numbers of
    rows take their steps together.
    """
    is_shared = MINIBATCH in experience.batch
    if is_shared:
        _check_number(experience, config.num_minibatches)
    for _ in range(config.num_epochs):
        for number, rows in enumerate(minibatch_rows(len(experience), config.num_minibatches)):
            if is_shared:
                yield experience[experience.batch[MINIBATCH] == number]
            else:
                yield experience[rows.start : rows.stop]


def _check_number(experience: DataProto, num_minibatches: int) -> None:
    """Rows of mini-batches that are never taken would silently teach nothing."""
    number = experience.meta_info.get(NUM_MINIBATCHES)
    if number != num_minibatches:
        raise DataError(
            f"the batch was shared out for {number} mini-batches, but learner.num_minibatches = {num_minibatches}; "
            f"call balanced_parts with num_minibatches={num_minibatches}"
        )


def mean_stats(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimiser steps taken, of each value over those that have it; and how many were taken or skipped.

    What a skipped step says is mostly NaN and would hide the others. Where all were skipped, it is all there is to see.
    """
    taken = [step for step in steps if not step["skipped_steps"]] or steps
    means = {}
    for name in dict.fromkeys(name for step in taken for name in step):
        values = [step[name] for step in taken if name in step]
        means[name] = sum(values) / len(values)
    skipped = sum(step["skipped_steps"] for step in steps)
    return {**means, "skipped_steps": skipped, "optimizer_steps": len(steps) - skipped}
