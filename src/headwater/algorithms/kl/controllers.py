"""How large the KL penalty is: fixed, or steered towards a target."""

from __future__ import annotations

import math
from typing import Protocol


class KLController(Protocol):
    coefficient: float

    def update(self, kl: float, num_samples: int) -> None:
        """Take note of a step's mean KL."""
        ...


class FixedKL:
    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing moves."""


class AdaptiveKL:
    """Raises the coefficient while the KL is above the target and lowers it below, by at most 20 % per ``horizon``
    samples, and never to less than 0, which would reward divergence."""

    def __init__(self, coefficient: float, *, target: float, horizon: int) -> None:
        self.coefficient = coefficient
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        if not math.isfinite(kl):
            return  # its step is skipped too; a coefficient that is NaN once would stay so
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.coefficient *= max(0.0, 1 + error * num_samples / self._horizon)
