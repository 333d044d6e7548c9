"""DPPO with total variation: the trust region bounds the probability of the sampled token, not its ratio."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from headwater.algorithms.masked import LogRatioLimit
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, log_ratios
from headwater.config.constraints import MoreThan, Within


@POLICY_LOSSES.register
def dppo_tv(
    inputs: PolicyLossInputs,
    *,
    bound_low: Annotated[float, Within(0, 1)] = 0.15,
    bound_high: Annotated[float, Within(0, 1)] = 0.15,
    max_ratio: Annotated[float, MoreThan(0, finite=False)] = 20.0,
    max_log_ratio: LogRatioLimit = 20.0,
) -> PolicyLoss:
    """``-A·min(r, max_ratio)·logp`` with a constant ratio, on tokens that may still move in the direction of ``A``:
    up while ``p - p_old <= bound_high``, down while ``p_old - p <= bound_low``."""
    with torch.no_grad():
        rise = inputs.logprobs.exp() - inputs.old_logprobs.exp()
        inside = torch.where(inputs.advantages > 0, rise <= bound_high, rise >= -bound_low)
    return inside_region_loss(inputs, inside, max_ratio, max_log_ratio)


def inside_region_loss(
    inputs: PolicyLossInputs, inside: Tensor, max_ratio: float, max_log_ratio: float | None
) -> PolicyLoss:
    """``-A·min(r, max_ratio)·logp`` where ``inside``, with a constant ratio."""
    log_ratio = log_ratios(inputs, max_log_ratio).detach()
    ratio, allowed = log_ratio.exp(), inside.to(log_ratio.dtype)
    losses = -inputs.advantages * ratio.clamp(max=max_ratio) * inputs.logprobs * allowed
    diagnostics = {
        "clip_fraction": 1 - allowed,
        "truncated_fraction": (ratio > max_ratio).to(ratio.dtype) * allowed,
        "approx_kl": -log_ratio,
    }
    return PolicyLoss(losses, diagnostics)
