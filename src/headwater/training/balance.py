"""Sharing a batch out over ranks so that all have about as much to compute."""

from __future__ import annotations

from headwater.core.data_proto import DataProto
from headwater.training.partition import partition, workload


def balanced_parts(batch: DataProto, num_parts: int) -> list[DataProto]:
    """The rows of ``batch`` for each rank. Samples of one prompt stay together: they share its computation."""
    lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        groups.setdefault(uid, []).append(row)
    rows = list(groups.values())
    if len(rows) < num_parts:  # fewer prompts than ranks: their samples have to part
        rows = [[row] for row in range(len(batch))]
    parts = partition([sum(workload(int(lengths[row])) for row in each) for each in rows], num_parts)
    return [batch[sorted(row for group in part for row in rows[group])] for part in parts]
