"""From trajectories to one padded batch: prompts end and responses begin at the same column."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.core.data_proto import DataProto
from headwater.core.records import NOT_SAMPLED, Trajectory


def pad_trajectories(trajectories: Sequence[Trajectory], pad_token_id: int) -> DataProto:
    """Left-pad the prompts and right-pad the responses.

    ``input_ids``, ``attention_mask`` and ``position_ids`` are ``[samples, prompt + response]``; ``response_mask`` (the
    loss mask), ``rollout_logprobs``, ``versions`` and ``rewards`` are ``[samples, response]``. The reward is on the
    last trained token; on the last token if none is trained; in the first column if there is no response, because the
    group still needs it for comparison. A reward of a turn is on the last token of that turn, also if the turn became
    too old to train on: its reward must not be credited to later turns.
    """
    prompt_width = max((each.prompt_length for each in trajectories), default=0)
    response_width = max((1, *(len(each.tokens) - each.prompt_length for each in trajectories)))
    rows, width = len(trajectories), prompt_width + response_width
    input_ids = torch.full((rows, width), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(rows, width, dtype=torch.int64)
    response_mask = torch.zeros(rows, response_width)
    logprobs = torch.zeros(rows, response_width)
    versions = torch.full((rows, response_width), NOT_SAMPLED, dtype=torch.int64)
    rewards = torch.zeros(rows, response_width)
    for row, each in enumerate(trajectories):
        start, length = each.prompt_length, len(each.tokens) - each.prompt_length
        left = prompt_width - start
        input_ids[row, left : left + len(each.tokens)] = torch.tensor(each.tokens)
        attention_mask[row, left : left + len(each.tokens)] = 1
        response_mask[row, :length] = torch.tensor(each.loss_mask[start:], dtype=torch.float32)
        logprobs[row, :length] = torch.tensor(each.logprobs[start:])
        versions[row, :length] = torch.tensor(each.versions[start:], dtype=torch.int64)
        if each.turn_rewards:
            rewards[row, [end - start for end in each.turn_ends]] = torch.tensor(each.turn_rewards)
        else:
            rewards[row, score_column(each)] = each.reward
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "rollout_logprobs": logprobs,
            "versions": versions,
            "rewards": rewards,
        },
        non_tensors={"uid": [each.uid for each in trajectories], "sample": [each.sample for each in trajectories]},
    )


def score_column(trajectory: Trajectory) -> int:
    """The response column of a trajectory's reward."""
    last = max((at for at, mask in enumerate(trajectory.loss_mask) if mask), default=len(trajectory.tokens) - 1)
    return max(0, last - trajectory.prompt_length)


def add_to_scores(rewards: torch.Tensor, scores: torch.Tensor, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Add one score per trajectory to ``rewards`` ``[samples, response]``, in the column of its reward."""
    columns = torch.tensor([score_column(each) for each in trajectories])
    return rewards.index_put((torch.arange(len(rewards)), columns), scores.to(rewards.dtype), accumulate=True)
