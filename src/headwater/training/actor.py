"""The policy's role in training: log-probs, and updates in mini-batches and epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from headwater.algorithms.kl.penalty import kl_penalty
from headwater.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from headwater.algorithms.proximal import loglinear
from headwater.config.schema import AlgorithmConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import RunError
from headwater.training.engine import TrainEngine
from headwater.training.passes import mean_stats, minibatches

PolicyLossFunction = Callable[[PolicyLossInputs], PolicyLoss]


class Actor:
    """Updates the policy.

    With ``training.skip_zero_advantages`` a sample whose advantage is zero everywhere is not computed: its gradient is
    zero, and it still counts in what the loss is averaged over, so the step is the same for less work. A mini-batch of
    nothing but such samples takes no step at all.
    """

    def __init__(
        self, engine: TrainEngine, policy_loss: PolicyLossFunction, algorithm: AlgorithmConfig, *, loss_width: int
    ) -> None:
        self.engine = engine
        self._policy_loss = policy_loss
        self._algorithm = algorithm
        self._loss_width = loss_width

    def logprobs(self, batch: DataProto) -> Tensor:
        return self.engine.compute(batch)["logprobs"]

    def update(self, experience: DataProto) -> dict[str, float]:
        """Train on ``experience``; returns the statistics, averaged over the optimiser steps taken."""
        if not self.engine.totals(experience).num_tokens and "correction_weights" not in experience.batch:
            raise RunError("no token of the batch is trained: every loss_mask is 0; check the workflow")
        steps = [self._step(minibatch) for minibatch in minibatches(experience, self.engine.config)]
        return mean_stats([stats for stats in steps if stats is not None])

    def _step(self, minibatch: DataProto) -> dict[str, float] | None:
        """One optimiser step; None where no sample has anything to teach."""
        totals = replace(self.engine.totals(minibatch), width=self._loss_width)
        if not totals.num_tokens:
            return None
        if self.engine.config.skip_zero_advantages:
            tensors = minibatch.batch
            informative = ((tensors["advantages"] != 0) & (tensors["response_mask"] != 0)).any(dim=1)
            if not self.engine.ranks.max(int(informative.sum())):
                return None
            minibatch = minibatch[informative]
        return self.engine.train_step(
            minibatch, self._token_losses, aggregation=self._algorithm.aggregation, totals=totals
        )

    def _token_losses(self, outputs: Mapping[str, Tensor], batch: DataProto) -> PolicyLoss:
        tensors, algorithm = batch.batch, self._algorithm
        logprobs, entropy, mask = outputs["logprobs"], outputs["entropy"], tensors["response_mask"]
        if algorithm.old_logprobs == "loglinear":
            version = batch.meta_info["version"]
            old = loglinear(tensors["rollout_logprobs"], logprobs.detach(), tensors["versions"], version)
        else:
            old = tensors["old_logprobs"]
        loss = self._policy_loss(
            PolicyLossInputs(
                logprobs,
                old,
                tensors["advantages"],
                mask,
                rollout_logprobs=tensors["rollout_logprobs"],
                entropy=entropy,
            )
        )
        if "correction_weights" in tensors:
            loss = loss.weighted(tensors["correction_weights"], mask)
        losses, diagnostics = loss.token_losses, dict(loss.diagnostics)
        if algorithm.kl_in_loss > 0:
            kl = kl_penalty(logprobs, tensors["reference_logprobs"], algorithm.kl_estimator)
            losses = losses + algorithm.kl_in_loss * kl
            diagnostics["reference_kl"] = kl.detach()
        if algorithm.entropy_bonus > 0:
            losses = losses - algorithm.entropy_bonus * entropy
        moved = (logprobs - old).detach()
        return replace(loss, token_losses=losses, diagnostics=diagnostics, log_ratios=moved)
