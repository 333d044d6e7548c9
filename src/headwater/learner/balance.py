"""Sharing a batch out over ranks so that all have about as much to compute in every optimiser step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.learner.partition import partition, workload
from headwater.learner.passes import MINIBATCH, NUM_MINIBATCHES, minibatch_rows


def balanced_parts(batch: DataProto, num_parts: int, *, num_minibatches: int) -> list[DataProto]:
    """The rows of ``batch`` for each rank, which together step through the mini-batches of one rank that has them all.

    The batch is cut into mini-batches first, and each is shared out on its own: ranks wait for each other at every
    optimiser step. Samples of one prompt stay together, since they share its computation, unless a mini-batch has fewer
    prompts than there are ranks. One of fewer rows than ranks leaves some ranks without any. The column ``minibatch``
    tells ``passes.minibatches`` which rows belong together.
    """
    if len(batch) < num_parts:
        raise DataError(f"{len(batch)} rows cannot fill {num_parts} ranks; use fewer ranks or more samples")
    costs = [workload(int(length)) for length in batch.batch["attention_mask"].sum(dim=1).tolist()]
    uids: list[str] = batch.non_tensor_batch["uid"].tolist()
    numbers = torch.zeros(len(batch), dtype=torch.long)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for number, rows in enumerate(minibatch_rows(len(batch), num_minibatches)):
        numbers[rows.start : rows.stop] = number
        shares = _shares(rows, uids, costs, num_parts)
        # Log-probs and values are computed of all mini-batches at once: who had less so far gets the larger share.
        for rank, share in zip(sorted(range(num_parts), key=loads.__getitem__), shares, strict=False):
            parts[rank] += share
            loads[rank] += _cost(share, costs)
    marked = batch.with_columns(tensors={MINIBATCH: numbers}, meta_info={NUM_MINIBATCHES: num_minibatches})
    return [marked[part] for part in parts]


def _shares(rows: range, uids: Sequence[str], costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """The rows of one mini-batch in at most ``num_parts`` shares of about the same cost, the largest first."""
    by_uid: dict[str, list[int]] = {}
    for row in rows:
        by_uid.setdefault(uids[row], []).append(row)
    groups = list(by_uid.values())
    if len(groups) < num_parts:  # fewer prompts than ranks: their samples have to part
        groups = [[row] for row in rows]
    if not groups:
        return []
    shares = partition([_cost(group, costs) for group in groups], min(num_parts, len(groups)))
    rows_of = [sorted(row for group in share for row in groups[group]) for share in shares]
    return sorted(rows_of, key=lambda share: -_cost(share, costs))


def _cost(rows: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[row] for row in rows)
