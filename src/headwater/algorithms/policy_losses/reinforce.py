"""REINFORCE, meant to be weighted by a correction when the data is not the current policy's."""

from __future__ import annotations

from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs


@POLICY_LOSSES.register
def reinforce(inputs: PolicyLossInputs) -> PolicyLoss:
    """``-A·logp``, times the correction's weight; with ``approx_kl`` to watch how far the policy has moved."""
    approx_kl = (inputs.old_logprobs - inputs.logprobs).detach()
    return PolicyLoss(-inputs.advantages * inputs.logprobs, {"approx_kl": approx_kl})
