"""Cutting a batch into micro-batches that fit a token budget, without computing on avoidable padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError

_FULL_WIDTH = ("input_ids", "attention_mask", "position_ids")


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers of each micro-batch: like lengths together, at most ``max_tokens`` once padded to the longest."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        row = lengths.index(longest)
        raise DataError(
            f"row {row} of the batch has {longest} tokens, over training.max_tokens_per_microbatch = {max_tokens}; "
            "raise that, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    plan: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not plan or (len(plan[-1]) + 1) * width > max_tokens:
            plan.append([])
            width = max(1, lengths[row])
        plan[-1].append(row)
    return plan


def sequence_lengths(batch: DataProto) -> list[int]:
    return [int(length) for length in batch.batch["attention_mask"].sum(dim=1).tolist()]


def trim(batch: DataProto) -> DataProto:
    """Drop the columns that are padding in every row, on the left of the prompts and on the right of the responses."""
    mask = batch.batch["attention_mask"]
    used = mask.any(dim=0).nonzero()[:, 0]
    if len(used) == 0:
        return batch
    first, last = int(used[0]), int(used[-1]) + 1
    response_width = batch.batch["response_mask"].shape[1]
    response_start = mask.shape[1] - response_width
    # One prompt column stays: the first response token is predicted from it.
    first = min(first, response_start - 1)
    num_responses = max(last - response_start, 0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in batch.batch.items():
        if name in _FULL_WIDTH:
            tensors[name] = tensor[:, first : response_start + num_responses]
        elif tensor.dim() == 2 and tensor.shape[1] == response_width:
            tensors[name] = tensor[:, :num_responses]
        else:
            tensors[name] = tensor
    return DataProto.from_dict(tensors=tensors, meta_info=batch.meta_info)
