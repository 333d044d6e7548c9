"""The KL penalty as a part of the reward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwater.algorithms.kl.penalty import kl_penalty
from headwater.algorithms.masked import keep, masked_mean


@dataclass(frozen=True)
class PenalizedRewards:
    rewards: Tensor
    """``[samples, tokens]``."""
    kl: float
    """Mean over the samples of each one's mean over tokens: what a controller is updated with."""


def penalize_rewards(
    rewards: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: str, coefficient: float
) -> PenalizedRewards:
    """``r - coefficient·kl`` at every kept token."""
    kl = keep(kl_penalty(old_logprobs, ref_logprobs, kind), mask)
    return PenalizedRewards(rewards - coefficient * kl, float(masked_mean(kl, mask, dim=-1).mean()))
