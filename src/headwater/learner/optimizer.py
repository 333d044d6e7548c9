"""AdamW with gradient clipping, a learning-rate schedule and optional CPU offload of its averages."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.config.schema import LearnerConfig, Schedule
from headwater.core.errors import RunError
from headwater.learner.loss_scale import LossScale

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

_MAX_BLOCK = 1 << 32


def held_by(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; all of it if the tensor is not sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


def hold(tensor: Tensor, storage: Tensor) -> None:
    """Make ``tensor``, the same object, hold ``storage``, which may be on another device."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = storage
    else:
        tensor.data = storage


class PinnedMemory:
    """Page-locked main memory, which a device copies to and from at full speed.

    torch rounds every pinned tensor up to a power of two, which can waste half of the memory. This class allocates
    blocks of a power of two and places tensors inside them.
    """

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes`` is the expected total. More blocks are allocated on demand."""
        self._block = min(_MAX_BLOCK, 1 << max(16, (num_bytes - 1).bit_length()))
        self._free: list[Tensor] = []

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64  # every tensor starts on a cache line
        for place, rest in enumerate(self._free):
            if len(rest) >= size:
                self._free[place] = rest[size:]
                break
        else:
            rest = torch.empty(max(size, self._block), dtype=torch.uint8, pin_memory=True)
            self._free.append(rest[size:])
        return rest[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate over a run: a linear warm-up, then constant, linear or cosine decay."""

    peak: float
    schedule: Schedule
    num_warmup_steps: int
    num_decay_steps: int
    """Steps from the end of the warm-up to the lowest rate. ``constant`` does not use it."""
    lowest_fraction: float
    """The rate at the end of the decay, as a fraction of the peak."""

    def at(self, step: int) -> float:
        """The rate of the optimiser step that follows ``step`` completed steps."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / (self.num_warmup_steps + 1)
        if self.schedule == "constant":
            return self.peak
        progress = min(1.0, (step - self.num_warmup_steps) / max(1, self.num_decay_steps))
        shape = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (self.lowest_fraction + (1 - self.lowest_fraction) * shape)


class Optimizer:
    """Applies gradients.

    With ``learner.offload_optimizer``, AdamW's two averages per weight stay in main memory and are copied to the device
    one parameter at a time. The device then holds weights, gradients and the averages of one parameter.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: LearnerConfig,
        num_decay_steps: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        """``loss_scale`` is the factor of the loss whose gradients ``step`` gets, if it has one."""
        if config.schedule != "constant" and num_decay_steps < 1:
            raise ValueError(
                f"num_decay_steps = {num_decay_steps}: learner.schedule = {config.schedule} decays until that step, "
                "including warm-up; pass the number of optimiser steps of the run"
            )
        self.num_steps = 0
        self.loss_scale = loss_scale
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
        # A streamed optimiser is one optimiser per parameter, each of which has its turn on the device.
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

        A step whose loss or gradient is not finite is skipped. Too many skipped steps in a row stop the run, except for
        those that a smaller loss scale can prevent.
        """
        scale = self.loss_scale
        if scale is not None:
            scale.unscale(self._parameters)
        norm = _global_norm(nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        stats = {"learning_rate": self.learning_rate, "skipped_steps": 0.0}
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
        elif scale is not None and scale.can_shrink and math.isfinite(loss):
            logger.info("the float16 gradient overflowed with a loss scale of %g; this step is skipped", scale.value)
            stats["skipped_steps"] = 1.0
        else:
            logger.warning("loss %g or gradient norm %g is not finite; this optimiser step is skipped", loss, norm)
            self._num_bad_steps += 1
            stats["skipped_steps"] = 1.0
        if scale is not None:
            stats["loss_scale"] = scale.value
            if math.isfinite(loss):
                scale.update(is_finite=math.isfinite(norm))
        self.clear()
        if self._num_bad_steps >= self._config.max_bad_steps:
            narrow = "" if scale is None else ", or use model.dtype=bfloat16, which has a larger range than float16"
            raise RunError(
                f"the loss or the gradient was not finite in {self._num_bad_steps} steps in a row "
                "(learner.max_bad_steps); "
                f"lower learner.learning_rate (= {self._config.learning_rate:g}) or learner.max_grad_norm "
                f"(= {self._config.max_grad_norm:g}){narrow}"
            )
        return stats

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's step count and averages of one parameter. Empty before the first step."""
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                return {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        return {}

    def reset_state(self, parameters: Collection[nn.Parameter]) -> None:
        """Discard all averages and allocate those of ``parameters``, which a checkpoint fills next."""
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

    @property
    def learning_rate(self) -> float:
        """The rate of the next optimiser step."""
        return self._learning_rate.at(self.num_steps)

    def settle(self) -> None:
        """Wait for copies to main memory to finish."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def move(self, device: torch.device) -> None:
        """Move the averages. A streamed optimiser keeps them in main memory."""
        if self._is_streamed:
            return
        for optimizer in self.optimizers:
            if device == CPU:
                self._send_home(optimizer)
            else:
                self._fetch(optimizer)

    @torch.no_grad()
    def _fetch(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the averages to the device."""
        for average in _averages(optimizer):
            hold(average, held_by(average).to(self._device, non_blocking=True))

    @torch.no_grad()
    def _send_home(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the averages to main memory. Each keeps the same memory for the whole run."""
        for average in _averages(optimizer):
            held = held_by(average)
            if held.device == CPU:
                continue
            if id(average) not in self._homes:
                self._homes[id(average)] = self._pinned.empty(held.shape, held.dtype)
            hold(average, self._homes[id(average)].copy_(held, non_blocking=True))


def _averages(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """AdamW's state except the step counts, whose device AdamW chooses."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                yield value


def _global_norm(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
