"""From trajectories to one padded batch: prompts end and responses begin at the same column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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
    input_ids = np.full((rows, width), pad_token_id, np.int64)
    attention_mask = np.zeros((rows, width), np.int64)
    response_mask = np.zeros((rows, response_width), np.float32)
    logprobs = np.zeros((rows, response_width), np.float32)
    versions = np.full((rows, response_width), NOT_SAMPLED, np.int64)
    rewards = np.zeros((rows, response_width), np.float32)
    for row, each in enumerate(trajectories):
        arrays, start, length = each.arrays, each.prompt_length, len(each.tokens) - each.prompt_length
        columns = slice(prompt_width - start, prompt_width + length)
        input_ids[row, columns] = arrays.tokens
        attention_mask[row, columns] = 1
        response_mask[row, :length] = arrays.loss_mask[start:]
        logprobs[row, :length] = arrays.logprobs[start:]
        versions[row, :length] = arrays.versions[start:]
        if each.turn_rewards:
            rewards[row, [end - start for end in each.turn_ends]] = each.turn_rewards
        else:
            rewards[row, score_column(each)] = each.reward
    attended = torch.from_numpy(attention_mask)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": attended,
            "position_ids": (attended.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": torch.from_numpy(response_mask),
            "rollout_logprobs": torch.from_numpy(logprobs),
            "versions": torch.from_numpy(versions),
            "rewards": torch.from_numpy(rewards),
        },
        non_tensors={"uid": [each.uid for each in trajectories], "sample": [each.sample for each in trajectories]},
    )


def score_column(trajectory: Trajectory) -> int:
    """The response column of a trajectory's reward."""
    num_tokens = len(trajectory.tokens)
    return max(0, trajectory.last_trained(0, num_tokens, default=num_tokens - 1) - trajectory.prompt_length)


def add_to_scores(rewards: torch.Tensor, scores: torch.Tensor, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Add one score per trajectory to ``rewards`` ``[samples, response]``, in the column of its reward."""
    columns = torch.tensor([score_column(each) for each in trajectories])
    return rewards.index_put((torch.arange(len(rewards)), columns), scores.to(rewards.dtype), accumulate=True)
