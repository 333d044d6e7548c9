"""How strongly a token's log-prob and advantage stand out together."""

from __future__ import annotations

from torch import Tensor

from headwater.algorithms.masked import keep, masked_mean
from headwater.algorithms.policy_losses import PolicyLossInputs


def token_covariance(inputs: PolicyLossInputs) -> Tensor:
    """``(A - mean A)·(logp - mean logp)`` over the kept tokens, without gradient."""
    advantages, logprobs, mask = inputs.advantages, inputs.logprobs.detach(), inputs.mask
    product = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return keep(product, mask)
