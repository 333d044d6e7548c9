"""DPPO with a binary KL: like ``dppo_tv``, but measured by the KL between "this token" and "any other token"."""

from __future__ import annotations

from typing import Annotated

import torch

from headwater.algorithms.masked import LogRatioLimit
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from headwater.algorithms.policy_losses.dppo_tv import inside_region_loss
from headwater.config.constraints import AtLeast, MoreThan

_EPSILON = 1e-8


@POLICY_LOSSES.register
def dppo_kl(
    inputs: PolicyLossInputs,
    *,
    bound_low: Annotated[float, AtLeast(0)] = 0.05,
    bound_high: Annotated[float, AtLeast(0)] = 0.05,
    max_ratio: Annotated[float, MoreThan(0, finite=False)] = 20.0,
    max_log_ratio: LogRatioLimit = 20.0,
) -> PolicyLoss:
    """``-A·min(r, max_ratio)·logp`` with a constant ratio, unless the token has already moved in the direction of ``A``
    by more than the bound, in binary KL from the old policy."""
    with torch.no_grad():
        p, old = inputs.logprobs.exp(), inputs.old_logprobs.exp()
        others = ((1 - old + _EPSILON) / (1 - p + _EPSILON)).log()
        divergence = old * (inputs.old_logprobs - inputs.logprobs) + (1 - old) * others
        up = (divergence <= bound_high) | (p <= old)
        down = (divergence <= bound_low) | (p >= old)
        inside = torch.where(inputs.advantages > 0, up, down)
    return inside_region_loss(inputs, inside, max_ratio, max_log_ratio)
