"""What the DPPO losses share: they differ only in which tokens may still move."""

from __future__ import annotations

from torch import Tensor

from headwater.algorithms.policy_losses import PolicyLoss, PolicyLossInputs, log_ratios


def inside_region_loss(inputs: PolicyLossInputs, inside: Tensor, max_ratio: float) -> PolicyLoss:
    """``-A·min(r, max_ratio)·logp`` where ``inside``, the ratio taken as a constant."""
    log_ratio = log_ratios(inputs).detach()
    ratio, allowed = log_ratio.exp(), inside.to(log_ratio.dtype)
    losses = -inputs.advantages * ratio.clamp(max=max_ratio) * inputs.logprobs * allowed
    diagnostics = {
        "clip_fraction": 1 - allowed,
        "truncated_fraction": (ratio > max_ratio).to(ratio.dtype) * allowed,
        "approx_kl": -log_ratio,
    }
    return PolicyLoss(losses, diagnostics)
