"""How far a log ratio of two policies may reach before its exponential is taken."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond it a ratio says no more than "far off"; without a bound one wild token would overflow."""


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
