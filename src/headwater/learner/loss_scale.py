"""The factor of the loss in float16, whose smallest numbers are too large for most gradients.

    scale = LossScale(65536.0, growth_steps=200)
    (loss * scale.value).backward()
    scale.unscale(parameters)           # the gradients of the loss itself, in float32
    scale.update(is_finite=True)        # after a gradient that overflowed: is_finite=False, and the step is skipped

The factor is halved after every overflow, and doubled after ``growth_steps`` steps without one. It is a power of two,
so multiplying and dividing by it rounds nothing. The state is part of a checkpoint, so a resumed run takes the same
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_LOWEST, _HIGHEST = 1.0, 2.0**24


class LossScale:
    def __init__(self, initial: float, *, growth_steps: int) -> None:
        self.value = initial
        self._growth_steps = growth_steps
        self._num_good_steps = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller factor is left to try. Without one, an overflow is not the factor's fault."""
        return self.value > _LOWEST

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients that this process holds by the factor."""
        gradients = [_held(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.value)

    def update(self, *, is_finite: bool) -> None:
        """Adapt the factor after a step whose gradient was finite or overflowed."""
        if not is_finite:
            self.value = max(_LOWEST, self.value / 2)
            self._num_good_steps = 0
            return
        self._num_good_steps += 1
        if self._num_good_steps >= self._growth_steps:
            self.value = min(_HIGHEST, self.value * 2)
            self._num_good_steps = 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "num_good_steps": self._num_good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value, self._num_good_steps = float(state["value"]), int(state["num_good_steps"])


def _held(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
