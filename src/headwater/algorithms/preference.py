"""Losses on pairs of a chosen and a rejected response."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """``-log sigmoid(beta·margin)``; the margin is ``(chosen - rejected)`` of the policy minus that of the reference,
    in summed log-probs."""
    return -logsigmoid(beta * margin)


def ipo(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """``(margin - 1/(2·beta))²``, with margins of log-probs averaged per token."""
    return (margin - 1 / (2 * beta)).square()
