"""Cutting a batch into micro-batches that fit a token budget, without computing on avoidable padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError

_FULL_WIDTH = ("input_ids", "attention_mask", "position_ids")
_RESPONSE_WIDTH = ("response_mask", "rollout_logprobs", "versions", "rewards", "old_logprobs", "advantages")


def plan_microbatches(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Row numbers of each micro-batch: like lengths together, at most ``max_tokens`` once padded.

    Prompts and responses are padded apart, so a micro-batch is as wide as its longest prompt and longest response.
    """
    lengths = [prompt + response for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    plan: list[list[int]] = []
    prompt_width = response_width = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if lengths[row] > max_tokens:
            raise DataError(
                f"row {row} of the batch has {lengths[row]} tokens, over training.max_tokens_per_microbatch = "
                f"{max_tokens}; raise that, or lower data.max_prompt_tokens or rollout.max_new_tokens"
            )
        wider = max(prompt_width, prompt_lengths[row]), max(response_width, response_lengths[row])
        if not plan or (len(plan[-1]) + 1) * sum(wider) > max_tokens:
            plan.append([])
            wider = prompt_lengths[row], response_lengths[row]
        prompt_width, response_width = wider
        plan[-1].append(row)
    return plan


def part_lengths(batch: DataProto) -> tuple[list[int], list[int]]:
    """Tokens of every prompt, and of every response."""
    mask, width = batch.batch["attention_mask"], batch.batch["response_mask"].shape[1]
    start = mask.shape[1] - width
    return mask[:, :start].sum(dim=1).tolist(), mask[:, start:].sum(dim=1).tolist()


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
        elif name in _RESPONSE_WIDTH:
            tensors[name] = tensor[:, :num_responses]
        else:
            raise ValueError(
                f"column {name!r} is neither of the sequences nor of the responses; drop it before training"
            )
    return DataProto.from_dict(tensors=tensors, meta_info=batch.meta_info)
