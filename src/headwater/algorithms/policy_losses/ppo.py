"""The clipped surrogate of PPO, with separate bounds and the dual clip."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.masked import LogRatioLimit
from headwater.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    clipped_surrogate,
    dual_clip_bound,
    log_ratios,
)
from headwater.config.constraints import AtLeast, MoreThan


@POLICY_LOSSES.register
def ppo(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, AtLeast(0)] = 0.2,
    clip_high: Annotated[float, AtLeast(0)] = 0.2,
    dual_clip: Annotated[float, MoreThan(1, finite=False)] = 3.0,
    max_log_ratio: LogRatioLimit = 20.0,
) -> PolicyLoss:
    """``max(-A·r, -A·clip(r, 1-low, 1+high))``; for ``A < 0`` at most ``-A·dual_clip``."""
    log_ratio = log_ratios(inputs, max_log_ratio)
    losses, clipped = clipped_surrogate(log_ratio.exp(), inputs.advantages, clip_low, clip_high)
    losses, bounded = dual_clip_bound(losses, inputs.advantages, dual_clip)
    diagnostics = {"clip_fraction": clipped, "dual_clip_fraction": bounded, "approx_kl": -log_ratio.detach()}
    return PolicyLoss(losses, diagnostics)
