"""Clip-Cov: removes a few tokens with a high covariance of log-prob and advantage, which reduce entropy most."""

from __future__ import annotations

from typing import Annotated

import torch

from headwater.algorithms.masked import LogRatioLimit
from headwater.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    clipped_surrogate,
    log_ratios,
    token_covariance,
)
from headwater.config.constraints import AtLeast, MoreThan, NotBelow, Within
from headwater.config.traits import LossTraits


@POLICY_LOSSES.register(LossTraits(needs_all_samples=True))
def clip_cov(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, AtLeast(0)] = 0.2,
    clip_high: Annotated[float, AtLeast(0)] = 0.2,
    fraction: Annotated[float, MoreThan(0), Within(0, 1)] = 2e-4,
    lower: float = 1.0,
    upper: Annotated[float, NotBelow("lower")] = 5.0,
    seed: Annotated[int, AtLeast(0)] = 0,
    max_log_ratio: LogRatioLimit = None,
) -> PolicyLoss:
    """PPO's clip, without a ``fraction`` of the tokens that is drawn from those whose covariance is in
    ``(lower, upper)``. ``seed`` makes the draw a function of the inputs. The covariance is computed per micro-batch."""
    log_ratio = log_ratios(inputs, max_log_ratio)
    losses, clipped = clipped_surrogate(log_ratio.exp(), inputs.advantages, clip_low, clip_high)
    kept = inputs.mask != 0
    covariance = token_covariance(inputs)
    candidates = (kept & (clipped == 0) & (covariance > lower) & (covariance < upper)).nonzero()
    num_taken = max(int(fraction * int(kept.sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:num_taken]
    rows, columns = candidates[order.to(candidates.device)].unbind(dim=1)
    taken = torch.zeros_like(losses).index_put_((rows, columns), losses.new_ones(()))
    return PolicyLoss(losses * (1 - taken), {"clip_fraction": taken, "approx_kl": -log_ratio.detach()})
