"""AdamW with clipping and a schedule, that skips what is not finite and can keep its averages in main memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.config.schema import LearnerConfig
from headwater.core.errors import RunError
from headwater.learner.memory import CPU, PinnedMemory, held_by, hold
from headwater.learner.schedule import LearningRate

logger = logging.getLogger(__name__)


class Optimizer:
    """Applies gradients.

    With ``learner.offload_optimizer`` AdamW's two averages per weight live in main memory and visit the device one
    parameter at a time: the device then holds weights, gradients and the averages of one parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: LearnerConfig, num_decay_steps: int) -> None:
        if config.schedule != "constant" and num_decay_steps < 1:
            raise ValueError(
                f"num_decay_steps = {num_decay_steps}: learner.schedule = {config.schedule} falls until then, warm-up "
                "included; give the run's number of optimiser steps"
            )
        self.num_steps = 0
        self._config = config
        self._parameters = list(parameters)
        self._learning_rate = LearningRate(
            config.learning_rate,
            config.schedule,
            config.num_warmup_steps,
            max(0, num_decay_steps - config.num_warmup_steps),
            config.lowest_learning_rate_fraction,
        )
        self._num_bad_steps = 0
        self._device = self._parameters[0].device
        self._is_streamed = config.offload_optimizer and self._device.type == "cuda"
        self._homes: dict[int, Tensor] = {}
        self._pinned = PinnedMemory(2 * sum(held_by(each).nbytes for each in self._parameters))
        # One optimiser per parameter where each takes its turn on the device.
        shares = [[each] for each in self._parameters] if self._is_streamed else [self._parameters]
        self.optimizers = [self._adamw(share) for share in shares]

    def _adamw(self, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
        config = self._config
        return torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=parameters[0].device.type == "cuda" or None,
        )

    def step(self, loss: float) -> dict[str, float]:
        """Apply the gradients of ``loss`` and clear them.

        A loss or gradient that is not finite is not applied, and too many of them in a row stop the run.
        """
        norm = _global_norm(nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        stats = {"learning_rate": self._learning_rate.at(self.num_steps), "skipped_steps": 0.0}
        if math.isfinite(norm) and math.isfinite(loss):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = stats["learning_rate"]
                if self._is_streamed:
                    self._fetch(optimizer)
                optimizer.step()
                if self._is_streamed:
                    self._send_home(optimizer)
            self.num_steps += 1
            self._num_bad_steps = 0
            stats["grad_norm"] = norm
        else:
            logger.warning("not finite: loss %g, gradient norm %g; this optimiser step is skipped", loss, norm)
            self._num_bad_steps += 1
            stats["skipped_steps"] = 1.0
        self.clear()
        if self._num_bad_steps >= self._config.max_bad_steps:
            raise RunError(
                f"loss or gradient were not finite {self._num_bad_steps} steps in a row (learner.max_bad_steps); "
                f"lower learner.learning_rate (= {self._config.learning_rate:g}) or learner.max_grad_norm "
                f"(= {self._config.max_grad_norm:g})"
            )
        return stats

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's step count and averages of one parameter; empty before its first step."""
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                return {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        return {}

    def reset_state(self, parameters: Collection[nn.Parameter]) -> None:
        """Forget the averages, and make room for those of ``parameters``, which are about to be read."""
        wanted = {id(parameter) for parameter in parameters}
        self._homes.clear()
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for parameter in optimizer.param_groups[0]["params"]:
                if id(parameter) not in wanted:
                    continue
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if parameter.is_cuda else None),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            if self._is_streamed:
                self._send_home(optimizer)
        self.settle()

    def settle(self) -> None:
        """Wait until what is on its way to main memory has arrived."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def move(self, device: torch.device) -> None:
        """Move the averages; a streamed optimiser's stay in main memory."""
        if self._is_streamed:
            return
        for optimizer in self.optimizers:
            if device == CPU:
                self._send_home(optimizer)
            else:
                self._fetch(optimizer)

    @torch.no_grad()
    def _fetch(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the averages to the device."""
        for average in _averages(optimizer):
            hold(average, held_by(average).to(self._device, non_blocking=True))

    @torch.no_grad()
    def _send_home(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the averages to main memory, each to the place it had there before."""
        for average in _averages(optimizer):
            held = held_by(average)
            if held.device == CPU:
                continue
            if id(average) not in self._homes:
                self._homes[id(average)] = self._pinned.empty(held.shape, held.dtype)
            hold(average, self._homes[id(average)].copy_(held, non_blocking=True))


def _averages(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All of AdamW's state but the step counts, which stay where it wants them."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                yield value


def _global_norm(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
