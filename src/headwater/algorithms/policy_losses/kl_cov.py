"""KL-Cov: penalises the tokens with the highest covariance of log-prob and advantage, which reduce entropy most."""

from __future__ import annotations

from typing import Annotated

import torch

from headwater.algorithms.masked import LogRatioLimit
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, log_ratios, token_covariance
from headwater.config.constraints import AtLeast, MoreThan, Within
from headwater.config.traits import LossTraits


@POLICY_LOSSES.register(LossTraits(needs_all_samples=True))
def kl_cov(
    inputs: PolicyLossInputs,
    *,
    fraction: Annotated[float, MoreThan(0), Within(0, 1)] = 2e-4,
    coefficient: Annotated[float, AtLeast(0)] = 1.0,
    max_log_ratio: LogRatioLimit = None,
) -> PolicyLoss:
    """``-A·r``, plus ``coefficient·|log r|`` on the ``fraction`` of tokens of highest covariance (at least one).

    There is no clip: it is intended for nearly on-policy samples. The covariance is computed per micro-batch.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    kept = inputs.mask != 0
    num_kept = int(kept.sum())
    num_held = min(max(int(fraction * num_kept), 1), num_kept)
    covariance = token_covariance(inputs).masked_fill(~kept, -torch.inf).flatten()
    held = torch.zeros_like(covariance).index_fill_(0, covariance.topk(num_held).indices, 1.0).view_as(log_ratio)
    # Only the ratio is bounded, so that the penalty has a gradient for a token that is far off.
    losses = -inputs.advantages * log_ratios(inputs, max_log_ratio).exp() + coefficient * held * log_ratio.abs()
    return PolicyLoss(losses, {"held_fraction": held, "approx_kl": log_ratio.detach().abs()})
