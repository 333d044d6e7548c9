"""The plain policy gradient, with no ratio and no clip."""

from __future__ import annotations

from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from headwater.config.traits import LossTraits


@POLICY_LOSSES.register(LossTraits(has_no_ratio=True))
def gpg(inputs: PolicyLossInputs) -> PolicyLoss:
    """``-A·logp``; only for samples of the current policy, because nothing corrects for an older one."""
    return PolicyLoss(-inputs.advantages * inputs.logprobs)
