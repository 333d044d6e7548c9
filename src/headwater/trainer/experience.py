"""From rollouts to what the learner trains on: old log-probs and advantages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwater.algorithms.advantages import AdvantageInputs
from headwater.algorithms.masked import masked_mean
from headwater.core.data_proto import DataProto
from headwater.rollout.group import RolloutBatch
from headwater.rollout.padding import pad_trajectories
from headwater.training.actor import Actor

AdvantageFunction = Callable[[AdvantageInputs], Tensor]


class ExperienceMaker:
    def __init__(
        self, advantage: AdvantageFunction, actor: Actor, *, recompute_old_logprobs: bool, pad_token_id: int
    ) -> None:
        self._advantage = advantage
        self._actor = actor
        self._recompute = recompute_old_logprobs
        self._pad_token_id = pad_token_id

    def make(self, batch: RolloutBatch) -> DataProto:
        """Adds ``old_logprobs`` and ``advantages``, both ``[samples, response]``, to the padded rollouts."""
        data = pad_trajectories(batch.trajectories, self._pad_token_id)
        groups = torch.tensor([number for number, group in enumerate(batch.groups) for _ in group.trajectories])
        inputs = AdvantageInputs(data.batch["rewards"], data.batch["response_mask"], groups)
        old_logprobs = self._actor.logprobs(data) if self._recompute else data.batch["rollout_logprobs"]
        return data.with_columns(tensors={"old_logprobs": old_logprobs, "advantages": self._advantage(inputs)})


def rollout_gap(experience: DataProto) -> float:
    """Mean absolute difference between the trainer's and the engine's log-probs: how far the two models disagree."""
    tensors = experience.batch
    gap = (tensors["old_logprobs"] - tensors["rollout_logprobs"]).abs()
    return float(masked_mean(gap, tensors["response_mask"]))
