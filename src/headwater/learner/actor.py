"""The policy: log-probs, and updates in mini-batches and epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwater.algorithms.corrections import Correction, CorrectionFunction, CorrectionInputs, combine
from headwater.algorithms.kl import kl_penalty
from headwater.algorithms.masked import StepTotals, required
from headwater.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from headwater.algorithms.proximal import loglinear
from headwater.config.schema import AlgorithmConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import MissingColumn, RunError
from headwater.core.learner import MEASURES_ITSELF
from headwater.learner.engine import TrainEngine, minibatches
from headwater.learner.step_sums import mean_stats

_PADDED = "pad_trajectories gives it"

_KEPT = "correction/kept_fraction"

PolicyLossFunction = Callable[[PolicyLossInputs], PolicyLoss]

_Work = tuple[DataProto, StepTotals]


class Actor:
    """Updates the policy.

    With ``learner.skip_zero_advantages``, samples whose advantage is zero everywhere are not computed. Their gradient
    is zero and they still count in the average of the loss, so the step is the same for less work. A mini-batch that
    has only such samples takes no optimiser step.
    """

    def __init__(
        self,
        engine: TrainEngine,
        policy_loss: PolicyLossFunction,
        algorithm: AlgorithmConfig,
        *,
        loss_width: int,
        corrections: Mapping[str, CorrectionFunction] | None = None,
    ) -> None:
        """``corrections`` are computed in every update, between the trained policy and the one that sampled."""
        self.engine = engine
        self._policy_loss = policy_loss
        self._algorithm = algorithm
        self._loss_width = loss_width
        self._corrections = corrections or {}
        # With several epochs the rows of the first optimiser step are trained again, so the trainer computes all.
        self._reuses = algorithm.old_logprobs == "recompute" and engine.config.num_epochs == 1

    def update(self, experience: DataProto) -> dict[str, float]:
        """Train on ``experience`` and return statistics, averaged over the optimiser steps.

        With ``algorithm.old_logprobs=recompute``, ``old_logprobs`` may be missing if the batch asks for it
        (``MEASURES_ITSELF``).
        """
        if not self.engine.totals(experience).num_tokens and "correction_weights" not in experience.batch:
            raise RunError("no token of the batch is trained: every loss_mask is 0; check the workflow")
        is_measured_here = self._measures(experience)
        # Otherwise the trainer has compared all rows.
        compares = is_measured_here or self._algorithm.old_logprobs in ("rollout", "loglinear")
        work: Iterable[_Work] = self._work(experience)
        if is_measured_here:
            work = self._measured(list(work))
        steps: list[dict[str, float]] = []
        for minibatch, totals in work:
            # Before the first optimiser step the policy is still the one of the batch's version.
            compares_now = compares and not steps and "rollout_logprobs" in minibatch.batch
            steps.append(
                self.engine.train_step(
                    minibatch,
                    self.token_losses,
                    aggregation=self._algorithm.aggregation,
                    totals=totals,
                    compares_rollouts=compares_now,
                )
            )
        stats = mean_stats(steps)
        if stats.get(_KEPT) == 0:
            raise RunError(
                f"algorithm.corrections = {list(self._algorithm.corrections)}: left no token of the step to train on; "
                "relax their bounds in algorithm.corrections_args, or find out why the engine's log-probs differ "
                "(actor/ratio_p* in metrics.jsonl)"
            )
        return stats

    def _work(self, experience: DataProto) -> Iterator[_Work]:
        """Of every optimiser step, the rows that have a gradient and the counts of its whole mini-batch."""
        for minibatch in minibatches(experience, self.engine.config):
            totals = replace(self.engine.totals(minibatch), width=self._loss_width)
            if not totals.num_tokens:
                continue
            if self.engine.config.skip_zero_advantages:
                informative = ((self._advantages(minibatch) != 0) & (minibatch.batch["response_mask"] != 0)).any(dim=1)
                if not self.engine.ranks.max(int(informative.sum())):
                    continue
                if not informative.all():
                    minibatch = minibatch[informative]
            yield minibatch, totals

    def _measures(self, batch: DataProto) -> bool:
        """Whether the update computes ``old_logprobs`` itself. If it was not asked, a missing column is a mistake."""
        return self._reuses and batch.meta_info.get(MEASURES_ITSELF, False) and "old_logprobs" not in batch.batch

    def _measured(self, work: Sequence[_Work]) -> list[_Work]:
        """Add the log-probs of the policy before the update, as ``old_logprobs``, to all optimiser steps but the first.

        The passes of the first step compute its own (``_old_logprobs``). The others stay on the device.
        """
        later = [minibatch for minibatch, _ in work[1:]]
        if not later:
            return list(work)
        values = self.engine.compute_on_device(DataProto.concat(later), "logprobs")
        known = torch.split(values, [len(minibatch) for minibatch in later])
        rest = zip(work[1:], known, strict=True)
        return [work[0], *((rows.with_columns({"old_logprobs": old}), totals) for (rows, totals), old in rest)]

    def token_losses(self, outputs: Mapping[str, Tensor], batch: DataProto) -> PolicyLoss:
        """The loss of every token before aggregation, from the ``logprobs`` and ``entropy`` in ``outputs``."""
        tensors, algorithm = batch.batch, self._algorithm
        logprobs, entropy, mask = outputs["logprobs"], outputs["entropy"], tensors["response_mask"]
        old = self._old_logprobs(batch, logprobs.detach())
        corrected = self._corrected(batch, logprobs)
        if corrected is not None:
            mask = corrected.mask
        loss = self._policy_loss(
            PolicyLossInputs(
                logprobs,
                old,
                self._advantages(batch),
                mask,
                # Most losses do not use them. A loss that does raises an error that names the column.
                rollout_logprobs=tensors.get("rollout_logprobs", None),
                entropy=entropy,
            )
        )
        if "correction_weights" in tensors:
            loss = loss.weighted(tensors["correction_weights"], mask)
        losses, diagnostics = loss.token_losses, dict(loss.diagnostics)
        if corrected is not None:
            loss = replace(loss.weighted(corrected.weights, mask), correction=corrected, weights=corrected.weights)
            losses = loss.token_losses
        if algorithm.kl_in_loss > 0:
            needed_by = f"algorithm.kl_in_loss = {algorithm.kl_in_loss:g}"
            remedy = "Learner.compute returns it; or set algorithm.kl_in_loss=0"
            reference = required(tensors, "reference_logprobs", needed_by, remedy)
            kl = kl_penalty(logprobs, reference, algorithm.kl_estimator, algorithm.kl_clamp)
            losses = losses + algorithm.kl_in_loss * kl
            diagnostics["reference_kl"] = kl.detach()
        if algorithm.entropy_bonus > 0:
            losses = losses - algorithm.entropy_bonus * entropy
        moved = (logprobs - old).detach()
        return replace(loss, token_losses=losses, diagnostics=diagnostics, log_ratios=moved)

    def _corrected(self, batch: DataProto, logprobs: Tensor) -> Correction | None:
        if not self._corrections:
            return None
        rollout = required(batch.batch, "rollout_logprobs", "algorithm.corrections", _PADDED)
        inputs = CorrectionInputs(logprobs.detach(), rollout, batch.batch["response_mask"])
        corrected = combine({name: correct(inputs) for name, correct in self._corrections.items()})
        shown = {f"correction/{name}": values for name, values in corrected.diagnostics.items()}
        return replace(corrected, diagnostics={**shown, _KEPT: corrected.mask})

    def _advantages(self, batch: DataProto) -> Tensor:
        needed_by = f"algorithm.policy_loss = {self._algorithm.policy_loss}"
        return required(batch.batch, "advantages", needed_by, "ExperienceMaker.make gives it, by algorithm.advantage")

    def _old_logprobs(self, batch: DataProto, logprobs: Tensor) -> Tensor:
        tensors, algorithm = batch.batch, self._algorithm
        if self._measures(batch):
            return logprobs  # the first optimiser step: the ratio is 1, and its gradient that of the log-prob
        if algorithm.old_logprobs != "loglinear":
            needed_by = f"algorithm.policy_loss = {algorithm.policy_loss}"
            return required(
                tensors, "old_logprobs", needed_by, "ExperienceMaker.make gives it, by algorithm.old_logprobs"
            )
        needed_by = "algorithm.old_logprobs = loglinear"
        version = batch.meta_info.get("version")
        if version is None:
            raise MissingColumn(
                f"{needed_by} needs the policy's version, and the batch has no meta_info['version']; "
                "ExperienceMaker.make gives it"
            )
        rollout = required(tensors, "rollout_logprobs", needed_by, _PADDED)
        return loglinear(rollout, logprobs, required(tensors, "versions", needed_by, _PADDED), version)
