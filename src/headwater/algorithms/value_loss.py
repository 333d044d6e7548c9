"""The loss of the critic, clipped around its old values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwater.algorithms.masked import keep

_HUBER_DELTA = 10.0


@dataclass(frozen=True)
class ValueLoss:
    token_losses: Tensor
    """They include the factor ½."""
    diagnostics: Mapping[str, Tensor]


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.5,
    kind: Literal["mse", "huber"] = "mse",
) -> ValueLoss:
    """``max(e(v), e(clip(v, old ± clip)))`` with ``e`` half the squared error, or Huber's (linear beyond 10)."""
    values, old_values, returns = (keep(each, mask) for each in (values, old_values, returns))
    near_old = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain, clipped = _error(values, returns, kind), _error(near_old, returns, kind)
    return ValueLoss(torch.maximum(plain, clipped), {"clip_fraction": (clipped > plain).to(values.dtype)})


def _error(values: Tensor, returns: Tensor, kind: str) -> Tensor:
    if kind == "huber":
        return torch.nn.functional.huber_loss(values, returns, reduction="none", delta=_HUBER_DELTA)
    return (values - returns).square() / 2
