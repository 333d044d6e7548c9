"""The single-process training engine: one model, one optimiser, gradients accumulated over micro-batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.algorithms.aggregate import token_mean
from headwater.algorithms.masked import masked_sum
from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import TrainingConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import RunError
from headwater.training.logprobs import response_logprobs
from headwater.training.microbatch import part_lengths, plan_microbatches, trim

logger = logging.getLogger(__name__)

LossFunction = Callable[[Tensor, DataProto], PolicyLoss]
"""From the current log-probs and the micro-batch to a loss per token."""

_MAX_BAD_STEPS = 3
"""Optimiser steps in a row with a gradient that is not finite before the run stops."""


class LocalTrainEngine:
    """Trains ``model`` on padded batches (see ``rollout.padding``).

    Every micro-batch's loss is divided by the token count of the whole step, so how a batch is cut never changes the
    gradient. The weights are float32; ``compute_dtype`` is what the forward and backward passes compute in. Dropout
    stays off: the policy that is trained is the one that sampled.
    """

    def __init__(
        self, model: Any, config: TrainingConfig, *, temperature: float, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = model.eval()
        self._compute_dtype = compute_dtype
        self.config = config
        self._temperature = temperature
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )
        self._num_steps = 0
        self._num_bad_steps = 0

    def sibling(self, config: TrainingConfig) -> LocalTrainEngine:
        """Another engine on the same weights, with an optimiser of its own."""
        return LocalTrainEngine(self.model, config, temperature=self._temperature, compute_dtype=self._compute_dtype)

    @torch.no_grad()
    def logprobs(self, batch: DataProto) -> Tensor:
        """Log-probs of the responses, ``[samples, response]``, zero where a row has no token."""
        result = torch.zeros_like(batch.batch["response_mask"])
        for rows, micro in self._microbatches(batch):
            logprobs, _ = self._forward(micro)
            result[rows, : logprobs.shape[1]] = logprobs.to(result.device)
        return result

    def train_step(self, batch: DataProto, loss_fn: LossFunction, num_tokens: float | None = None) -> dict[str, float]:
        """One optimiser step on the whole batch. A gradient that is not finite is skipped and counted, not applied.

        ``num_tokens`` is the token count that losses are averaged over: the batch's own, unless rows without a gradient
        were left out of it.
        """
        num_tokens = float(batch.batch["response_mask"].sum()) if num_tokens is None else num_tokens
        if num_tokens == 0:
            raise RunError("no token of the batch is trained: every loss_mask is 0; check the workflow")
        total_loss, num_seen = 0.0, 0.0
        totals: dict[str, Tensor] = {}
        for _, micro in self._microbatches(batch):
            mask = micro.batch["response_mask"]
            logprobs, entropy = self._forward(micro)
            loss = loss_fn(logprobs, micro)
            scaled = token_mean(loss.token_losses, mask, num_tokens)
            scaled.backward()  # type: ignore[no-untyped-call]
            num_seen += float(mask.sum())
            for name, values in {"entropy": entropy, **loss.diagnostics}.items():
                totals[name] = totals.get(name, torch.zeros(())) + masked_sum(values, mask).cpu()
            total_loss += scaled.item()
        means = {name: float(total) / num_seen for name, total in totals.items()}
        return {"loss": total_loss, **means, **self._apply_gradient()}

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """Optimiser state; the weights are saved beside it in Hugging Face format by the checkpoint."""
        state = {"optimizer": self._optimizer.state_dict(), "num_steps": self._num_steps}
        torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_steps = state["num_steps"]

    def _forward(self, micro: DataProto) -> tuple[Tensor, Tensor]:
        low_precision = self._compute_dtype != torch.float32
        with torch.autocast(self.model.device.type, dtype=self._compute_dtype, enabled=low_precision):
            return response_logprobs(self.model, micro, self._temperature)

    def _microbatches(self, batch: DataProto) -> Iterator[tuple[list[int], DataProto]]:
        for rows in plan_microbatches(*part_lengths(batch), self.config.max_tokens_per_microbatch):
            yield rows, trim(batch[rows]).to(self.model.device)

    def _apply_gradient(self) -> dict[str, float]:
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        stats = {"learning_rate": self._learning_rate(), "skipped_steps": 0.0}
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = stats["learning_rate"]
            self._optimizer.step()
            self._num_steps += 1
            self._num_bad_steps = 0
            stats["grad_norm"] = norm
        else:
            logger.warning("the gradient is not finite: this optimiser step is skipped")
            self._num_bad_steps += 1
            stats["skipped_steps"] = 1.0
        self._optimizer.zero_grad(set_to_none=True)
        if self._num_bad_steps >= _MAX_BAD_STEPS:
            raise RunError(
                f"the gradient was not finite {_MAX_BAD_STEPS} steps in a row; lower training.learning_rate "
                f"(= {self.config.learning_rate:g}) or training.max_grad_norm (= {self.config.max_grad_norm:g})"
            )
        return stats

    def _learning_rate(self) -> float:
        """Linear warm-up, then constant."""
        warmup = self.config.num_warmup_steps
        return self.config.learning_rate * min(1.0, (self._num_steps + 1) / (warmup + 1))
