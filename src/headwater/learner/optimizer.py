"""AdamW with gradient clipping and a learning-rate schedule, and tensors that leave the device between two steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.config.schema import LearnerConfig, Schedule
from headwater.core.errors import RunError
from headwater.learner.held import averages_of, held_by
from headwater.learner.loss_scale import LossScale
from headwater.learner.streamed_averages import StreamedAverages
from headwater.models.pinned import PinnedMemory

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


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

    With ``learner.offload_optimizer``, AdamW's two averages per weight stay in main memory and pass through the device
    in each step (``StreamedAverages``).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: LearnerConfig,
        num_decay_steps: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        """``loss_scale`` is the factor of the loss whose gradients ``step`` gets, if it has one."""
        if (config.schedule != "constant" or config.warmup_fraction) and num_decay_steps < 1:
            raise ValueError(
                f"num_decay_steps = {num_decay_steps}: learner.schedule = {config.schedule} and "
                f"learner.warmup_fraction = {config.warmup_fraction} depend on it; pass the number of optimiser steps "
                "of the run"
            )
        self.num_steps = 0
        self.loss_scale = loss_scale
        self._config = config
        self._parameters = list(parameters)
        num_warmup_steps = config.num_warmup_steps or int(config.warmup_fraction * num_decay_steps)
        self._learning_rate = LearningRate(
            config.learning_rate,
            config.schedule,
            num_warmup_steps,
            max(0, num_decay_steps - num_warmup_steps),
            config.lowest_learning_rate_fraction,
        )
        self._num_bad_steps = 0
        self._device = self._parameters[0].device
        self._is_streamed = config.offload_optimizer and self._device.type == "cuda"
        self._streamed: StreamedAverages | None = None
        if self._is_streamed:
            pinned = PinnedMemory(2 * sum(held_by(each).nbytes + 64 for each in self._parameters))
            self._streamed = StreamedAverages(self._device, pinned)
        self.residency = Residency(self._device)
        """Of the averages, if they are not streamed."""
        # A streamed optimiser is one optimiser per parameter, each of which has its turn on the device.
        shares = [[each] for each in self._parameters] if self._is_streamed else [self._parameters]
        self.optimizers = [self._adamw(share) for share in shares]
        # torch's fused kernel can skip a step by a number that is on the device.
        is_plain = not any(isinstance(each, DTensor) for each in self._parameters)
        self._can_queue = self._device.type == "cuda" and is_plain and not self._is_streamed and loss_scale is None
        self._is_queued = False

    def _adamw(self, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
        config = self._config
        return torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=parameters[0].device.type == "cuda" or None,
        )

    def clip(self) -> Tensor:
        """Clip the gradients, and return their norm from before, still on the device."""
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def queue(self, loss: Tensor, norm: Tensor) -> None:
        """Let the device apply the gradients if both numbers are finite, before the host knows them, where possible.

        The device then has work while the host reads them. ``step`` follows in any case, with the same numbers.
        """
        if not self._can_queue:
            return
        is_bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        for optimizer in self.optimizers:
            optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]  # as torch's GradScaler does
        try:
            self._apply()
        finally:
            for optimizer in self.optimizers:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self._is_queued = True

    def _apply(self) -> None:
        """One step of AdamW."""
        self.residency.wait()
        self.residency.changed()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
        if self._streamed is not None:
            self._streamed.step(self.optimizers)
        else:
            for optimizer in self.optimizers:
                optimizer.step()

    def step(self, loss: float, norm: float) -> dict[str, float]:
        """Apply the gradients of ``loss``, which ``clip`` has clipped from ``norm``, and clear them.

        A step whose loss or gradient is not finite is skipped. Too many skipped steps in a row stop the run, except for
        those that a smaller loss scale can prevent.
        """
        scale = self.loss_scale
        stats = {"learning_rate": self.learning_rate, "skipped_steps": 0.0}
        is_queued, self._is_queued = self._is_queued, False
        if math.isfinite(norm) and math.isfinite(loss):
            if not is_queued:
                self._apply()
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
        self.residency.wait()
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                return {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        return {}

    def reset_state(self, parameters: Collection[nn.Parameter]) -> None:
        """Discard all averages and allocate those of ``parameters``, which a checkpoint fills next."""
        wanted = {id(parameter) for parameter in parameters}
        self.residency.changed()
        if self._streamed is not None:
            self._streamed.forget()
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
            if self._streamed is not None:
                self._streamed.send_home(optimizer)
        self.settle()

    @property
    def num_bytes_moved(self) -> int:
        """Of the averages, between the device and main memory, since the beginning."""
        return self.residency.num_bytes_moved + (self._streamed.num_bytes_moved if self._streamed is not None else 0)

    @property
    def learning_rate(self) -> float:
        """The rate of the next optimiser step."""
        return self._learning_rate.at(self.num_steps)

    def settle(self) -> None:
        """Wait for copies to main memory to finish."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        """Discard the gradients. A step that is queued is not recalled, so it counts even if ``step`` never followed.

        Whether the device has skipped it is not known then.
        """
        if self._is_queued:
            self._is_queued = False
            self.num_steps += 1
        for parameter in self._parameters:
            parameter.grad = None

    def move(self, device: torch.device) -> None:
        """Move the averages. A streamed optimiser keeps them in main memory."""
        if self._is_streamed:
            return
        if device == CPU:
            self.residency.release(average for each in self.optimizers for average in averages_of(each))
        else:
            self.residency.restore()  # the next step waits for the copy


class Residency:
    """One group of tensors that leaves the device and returns together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moves = device.type == "cuda"
        self._storages: list[torch.UntypedStorage] = []
        self._homes: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        """The end of the last copy."""
        self._is_copied = False
        """Main memory has the present values, or will have them after ``_done``."""
        self.is_away = False
        self.num_bytes_moved = 0
        """Copied in either direction, since the beginning."""

    def changed(self) -> None:
        """The tensors get new values: the copy in main memory is no longer valid."""
        self._is_copied = False

    @torch.no_grad()
    def copy_out(self, tensors: Iterable[Tensor]) -> None:
        """Start to copy the tensors to main memory. They stay on the device."""
        if not self._moves or self.is_away or self._is_copied:
            return
        self._take(tensors)
        with self._on_stream() as stream:
            for storage, home in zip(self._storages, self._homes, strict=True):
                home.copy_(_bytes_of(storage, self._device), non_blocking=True)
                self.num_bytes_moved += home.nbytes
            self._done = stream.record_event()
        self._is_copied = True

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Wait for the copy, and free the memory on the device."""
        if not self._moves or self.is_away:
            return
        self.copy_out(tensors)
        if self._done is not None:
            self._done.synchronize()
        self._synchronize()  # others may use the memory at once, on any stream
        self.is_away = True  # first: an interrupt below leaves some without memory, and ``restore`` repairs that
        for storage in self._storages:
            storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the memory again and start to copy the values into it.

        If there is not enough memory, nothing is allocated, and this can be repeated, as after an interrupt.
        """
        if not self.is_away:
            return
        try:
            for storage, home in zip(self._storages, self._homes, strict=True):
                storage.resize_(home.nbytes)
        except torch.OutOfMemoryError:
            for storage in self._storages:
                storage.resize_(0)
            raise
        with self._on_stream() as stream:
            for storage, home in zip(self._storages, self._homes, strict=True):
                memory = _bytes_of(storage, self._device).copy_(home, non_blocking=True)
                if memory.is_cuda:  # tensors that are dropped now must not lose it before the copy has ended
                    memory.record_stream(stream)
                self.num_bytes_moved += home.nbytes
            self._done = stream.record_event()
        self.is_away = False  # last: until here the tensors may have memory without values

    def wait(self) -> None:
        """Make work that is queued from now on wait for the last copy. The host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def _take(self, tensors: Iterable[Tensor]) -> None:
        """Find the memory of the tensors. Page-locked memory for it is allocated once."""
        storages = {}
        for tensor in tensors:
            storage = held_by(tensor).untyped_storage()
            if storage.device.type == self._device.type and storage.nbytes():
                storages[storage.data_ptr()] = storage  # tied weights share one
        self._storages = list(storages.values())
        sizes = [storage.nbytes() for storage in self._storages]
        if [home.nbytes for home in self._homes] != sizes:
            self._homes = self._allocate(sizes)

    def _allocate(self, sizes: list[int]) -> list[Tensor]:
        pinned = PinnedMemory(sum(-(-size // 64) * 64 for size in sizes))
        return [pinned.empty(torch.Size((size,)), torch.uint8) for size in sizes]

    def _synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[torch.cuda.Stream]:
        """Work on the separate stream, after everything that is queued on the current one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield self._stream


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
