"""Parts of verl and AReaL that no setting of Headwater reaches. The vectors cover them, so they are kept here.

Everything else that the adapters call is code of ``src``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headwater.algorithms.masked import keep, masked_mean, whiten
from headwater.learner.critic import value_loss


def dpo(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """``-log sigmoid(beta·margin)``. The margin is chosen minus rejected log-probs, policy minus reference."""
    return -logsigmoid(beta * margin)


def ipo(margin: Tensor, *, beta: float = 0.1) -> Tensor:
    """``(margin - 1/(2·beta))²``, with margins of log-probs averaged per token."""
    return (margin - 1 / (2 * beta)).square()


def response_mask(tokens: Tensor, end_tokens: Sequence[int]) -> Tensor:
    """1 up to and including the first end token of each row; Headwater knows where a response ends."""
    ends = torch.isin(tokens, torch.tensor(list(end_tokens))).long()
    return (ends.cumsum(dim=-1) - ends == 0).long()


def whiten_around_the_mean(values: Tensor, mask: Tensor) -> Tensor:
    """verl's ``shift_mean=False``: unit variance around the old mean."""
    return keep(whiten(values, mask) + masked_mean(values, mask), mask)


def areal_value_clip_mask(values: Tensor, old: Tensor, target: Tensor, mask: Tensor, clip: float, kind: str) -> Tensor:
    """AReaL clips by ``old + clamp(v - old)``, whose rounding can count a value as clipped that was not changed."""
    near_old = old + (values - old).clamp(-clip, clip)
    plain, clipped = (
        value_loss(each, old, target, mask, clip=torch.inf, kind=kind).token_losses for each in (values, near_old)
    )
    return keep((clipped > plain).float(), mask)
