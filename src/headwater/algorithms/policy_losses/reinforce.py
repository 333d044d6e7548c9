"""REINFORCE; use it with a correction if the samples are not of the current policy."""

from __future__ import annotations

from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from headwater.config.traits import LossTraits


@POLICY_LOSSES.register(LossTraits(has_no_ratio=True))
def reinforce(inputs: PolicyLossInputs) -> PolicyLoss:
    """``-A·logp``; reports ``approx_kl``, which shows how far the policy has moved."""
    approx_kl = (inputs.old_logprobs - inputs.logprobs).detach()
    return PolicyLoss(-inputs.advantages * inputs.logprobs, {"approx_kl": approx_kl})
