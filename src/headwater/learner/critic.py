"""The critic: predicts, before every token, the return that is still to come. Its loss is clipped around old values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headwater.algorithms.masked import keep, required
from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import AlgorithmConfig
from headwater.config.training_schema import CriticConfig
from headwater.core.data_proto import DataProto
from headwater.learner.engine import TrainEngine, minibatches
from headwater.learner.step_sums import mean_stats

_USER = "critic.enabled = true"
_HUBER_DELTA = 10.0


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
        return self.engine.train_step(minibatch, self.token_losses, aggregation=self._aggregation, totals=totals)

    def token_losses(self, outputs: Mapping[str, Tensor], batch: DataProto) -> PolicyLoss:
        tensors = batch.batch
        values, mask = outputs["values"], tensors["response_mask"]
        old = required(tensors, "values", _USER, "Critic.values gives it, before the update")
        returns = required(tensors, "returns", _USER, "ExperienceMaker.make gives it, by algorithm.advantage")
        loss = value_loss(values, old, returns, mask, clip=self._config.clip, kind=self._config.loss)
        return PolicyLoss(loss.token_losses, {**loss.diagnostics, "value": values.detach()})


@dataclass(frozen=True)
class ValueLoss:
    token_losses: Tensor
    """They include the factor ½."""
    diagnostics: Mapping[str, Tensor]


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.5,
    kind: Literal["mse", "huber"] = "mse",
) -> ValueLoss:
    """``max(e(v), e(clip(v, old ± clip)))`` with ``e`` half the squared error, or Huber's (linear beyond 10)."""
    values, old_values, returns = (keep(each, mask) for each in (values, old_values, returns))
    near_old = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain, clipped = _error(values, returns, kind), _error(near_old, returns, kind)
    return ValueLoss(torch.maximum(plain, clipped), {"clip_fraction": (clipped > plain).to(values.dtype)})


def _error(values: Tensor, returns: Tensor, kind: str) -> Tensor:
    if kind == "huber":
        return torch.nn.functional.huber_loss(values, returns, reduction="none", delta=_HUBER_DELTA)
    return (values - returns).square() / 2
