"""The clipped surrogate of PPO, with separate bounds and the dual clip."""

from __future__ import annotations

import torch

from headwater.algorithms.policy_losses import MAX_LOG_RATIO, POLICY_LOSSES, PolicyLoss, PolicyLossInputs


@POLICY_LOSSES.register
def ppo(
    inputs: PolicyLossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> PolicyLoss:
    """``max(-A·r, -A·clip(r, 1-low, 1+high))``; for ``A < 0`` at most ``-A·dual_clip``."""
    advantages = inputs.advantages
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(plain, clipped)
    bounded = torch.minimum(losses, -advantages * dual_clip)
    with torch.no_grad():
        diagnostics = {
            "clip_fraction": (clipped > plain).float(),
            "approx_kl": -log_ratio,
        }
    return PolicyLoss(torch.where(advantages < 0, bounded, losses), diagnostics)
