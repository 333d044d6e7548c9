"""The policy's role in training: log-probs, and updates in mini-batches and epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.core.data_proto import DataProto
from headwater.training.engine import LocalTrainEngine

PolicyLossFunction = Callable[[Tensor, Tensor, Tensor], PolicyLoss]
"""From current log-probs, old log-probs and advantages to a loss per token."""


class Actor:
    def __init__(
        self,
        engine: LocalTrainEngine,
        policy_loss: PolicyLossFunction,
        *,
        num_minibatches: int,
        num_epochs: int,
    ) -> None:
        self.engine = engine
        self._policy_loss = policy_loss
        self._num_minibatches = num_minibatches
        self._num_epochs = num_epochs

    def logprobs(self, batch: DataProto) -> Tensor:
        return self.engine.logprobs(batch)

    def update(self, experience: DataProto) -> dict[str, float]:
        """Train on ``experience``; returns the statistics, averaged over the optimiser steps taken."""
        steps = [
            self.engine.train_step(minibatch, self._token_losses)
            for _ in range(self._num_epochs)
            for minibatch in self._minibatches(experience)
        ]
        return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}

    def _token_losses(self, logprobs: Tensor, batch: DataProto) -> PolicyLoss:
        return self._policy_loss(logprobs, batch.batch["old_logprobs"], batch.batch["advantages"])

    def _minibatches(self, experience: DataProto) -> Iterator[DataProto]:
        """Whole groups only: a mini-batch that held half a group would see a biased baseline."""
        rows_of: dict[str, list[int]] = {}
        for row, uid in enumerate(experience.non_tensor_batch["uid"]):
            rows_of.setdefault(uid, []).append(row)
        groups = list(rows_of.values())
        size = -(-len(groups) // self._num_minibatches)
        for start in range(0, len(groups), size):
            yield experience[[row for group in groups[start : start + size] for row in group]]
