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
    """Updates the policy.

    With ``skip_zero_advantages`` a sample whose advantage is zero everywhere is not computed: its gradient is zero, and
    it still counts among the tokens that the loss is averaged over. The update is the same, for less work.
    """

    def __init__(
        self,
        engine: LocalTrainEngine,
        policy_loss: PolicyLossFunction,
        *,
        num_minibatches: int,
        num_epochs: int,
        skip_zero_advantages: bool,
    ) -> None:
        self.engine = engine
        self._policy_loss = policy_loss
        self._num_minibatches = num_minibatches
        self._num_epochs = num_epochs
        self._skip_zero_advantages = skip_zero_advantages

    def logprobs(self, batch: DataProto) -> Tensor:
        return self.engine.logprobs(batch)

    def update(self, experience: DataProto) -> dict[str, float]:
        """Train on ``experience``; returns the statistics, averaged over the optimiser steps taken."""
        steps = [
            stats
            for _ in range(self._num_epochs)
            for minibatch in self._minibatches(experience)
            if (stats := self._step(minibatch)) is not None
        ]
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]} if steps else {}
        return {**means, "optimizer_steps": len(steps)}

    def _step(self, minibatch: DataProto) -> dict[str, float] | None:
        """One optimiser step; None where no sample has anything to teach."""
        num_tokens = float(minibatch.batch["response_mask"].sum())
        if self._skip_zero_advantages:
            informative = (minibatch.batch["advantages"] != 0).any(dim=1)
            if not informative.any():
                return None
            minibatch = minibatch[informative]
        return self.engine.train_step(minibatch, self._token_losses, num_tokens)

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
