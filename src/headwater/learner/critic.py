"""The critic: predicts, before every token, the return that is still to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from headwater.algorithms.masked import required
from headwater.algorithms.policy_losses import PolicyLoss
from headwater.algorithms.value_loss import value_loss
from headwater.config.schema import AlgorithmConfig, CriticConfig
from headwater.core.data_proto import DataProto
from headwater.learner.engine import TrainEngine, mean_stats, minibatches

_USER = "critic.enabled = true"


class Critic:
    """Learns to predict the returns of the policy's responses."""

    def __init__(
        self, engine: TrainEngine, config: CriticConfig, algorithm: AlgorithmConfig, *, loss_width: int
    ) -> None:
        self.engine = engine
        self._config = config
        self._aggregation = algorithm.aggregation
        self._loss_width = loss_width

    def values(self, batch: DataProto) -> Tensor:
        return self.engine.compute(batch)["values"]

    def update(self, experience: DataProto) -> dict[str, float]:
        """Train on the ``returns`` of ``experience`` and return statistics, averaged over the optimiser steps."""
        steps = [self._step(minibatch) for minibatch in minibatches(experience, self.engine.config)]
        return mean_stats([stats for stats in steps if stats is not None])

    def _step(self, minibatch: DataProto) -> dict[str, float] | None:
        """One optimiser step, or None if the mini-batch has no trained token."""
        totals = replace(self.engine.totals(minibatch), width=self._loss_width)
        if not totals.num_tokens:
            return None
        return self.engine.train_step(minibatch, self._token_losses, aggregation=self._aggregation, totals=totals)

    def _token_losses(self, outputs: Mapping[str, Tensor], batch: DataProto) -> PolicyLoss:
        tensors = batch.batch
        values, mask = outputs["values"], tensors["response_mask"]
        old = required(tensors, "values", _USER, "Critic.values gives it, before the update")
        returns = required(tensors, "returns", _USER, "ExperienceMaker.make gives it, by algorithm.advantage")
        loss = value_loss(values, old, returns, mask, clip=self._config.clip, kind=self._config.loss)
        return PolicyLoss(loss.token_losses, {**loss.diagnostics, "value": values.detach()})
