"""Clip-Cov: stop a few tokens whose log-prob and advantage rise together, which is what eats entropy."""

from __future__ import annotations

import torch

from headwater.algorithms.covariance import token_covariance
from headwater.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    clipped_surrogate,
    log_ratios,
)


@POLICY_LOSSES.register
def clip_cov(
    inputs: PolicyLossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    seed: int = 0,
) -> PolicyLoss:
    """PPO's clip; besides, ``fraction`` of the tokens, drawn among those whose covariance is in ``(lower, upper)``, are
    taken out. ``seed`` makes the draw a function of the inputs. The covariance is that of the micro-batch."""
    log_ratio = log_ratios(inputs)
    losses, clipped = clipped_surrogate(log_ratio.exp(), inputs.advantages, clip_low, clip_high)
    kept = inputs.mask != 0
    covariance = token_covariance(inputs)
    candidates = (kept & (clipped == 0) & (covariance > lower) & (covariance < upper)).nonzero()
    num_taken = max(int(fraction * int(kept.sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:num_taken]
    rows, columns = candidates[order.to(candidates.device)].unbind(dim=1)
    taken = torch.zeros_like(losses).index_put_((rows, columns), losses.new_ones(()))
    return PolicyLoss(losses * (1 - taken), {"clip_fraction": taken, "approx_kl": -log_ratio.detach()})
