"""The policy's role in training: log-probs, and updates in mini-batches and epochs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headwater.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from headwater.core.data_proto import DataProto
from headwater.training.engine import LocalTrainEngine

PolicyLossFunction = Callable[[PolicyLossInputs], PolicyLoss]


class Actor:
    """Updates the policy.

    With ``skip_zero_advantages`` a sample whose advantage is zero everywhere is not computed: its gradient is zero, and
    it still counts among the tokens that the loss is averaged over, so the step is the same for less work. A mini-batch
    of nothing but such samples takes no step at all.
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
        means = {}
        for name in dict.fromkeys(name for step in steps for name in step):
            values = [step[name] for step in steps if name in step]
            means[name] = sum(values) / len(values)
        skipped = sum(step["skipped_steps"] for step in steps)
        return {**means, "skipped_steps": skipped, "optimizer_steps": len(steps) - skipped}

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
        tensors = batch.batch
        return self._policy_loss(
            PolicyLossInputs(logprobs, tensors["old_logprobs"], tensors["advantages"], tensors["response_mask"])
        )

    def _minibatches(self, experience: DataProto) -> list[DataProto]:
        return experience.split(-(-len(experience) // self._num_minibatches))
