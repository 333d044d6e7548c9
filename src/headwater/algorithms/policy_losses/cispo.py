"""CISPO: clips the importance weight instead of the update, so that every token keeps its gradient."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.masked import LogRatioLimit
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, log_ratios
from headwater.config.constraints import AtLeast


@POLICY_LOSSES.register
def cispo(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, AtLeast(0)] = 1.0,
    clip_high: Annotated[float, AtLeast(0)] = 4.0,
    max_log_ratio: LogRatioLimit = 20.0,
) -> PolicyLoss:
    """``-clip(r, 1-low, 1+high)·A·logp``, with the clipped ratio as a constant."""
    log_ratio = log_ratios(inputs, max_log_ratio).detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    diagnostics = {"clip_fraction": (ratio != clipped).to(ratio.dtype), "approx_kl": -log_ratio}
    return PolicyLoss(-clipped * inputs.advantages * inputs.logprobs, diagnostics)
