"""DRO: a policy gradient with a squared log ratio as penalty, for samples of any policy."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from headwater.config.constraints import MoreThan
from headwater.config.traits import LossTraits


@POLICY_LOSSES.register(LossTraits(needs_all_samples=True, has_no_ratio=True))
def dro(inputs: PolicyLossInputs, *, beta: Annotated[float, MoreThan(0)] = 0.1) -> PolicyLoss:
    """``-(A·logp - beta/2·(log r)²)``."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    losses = -(inputs.advantages * inputs.logprobs - beta / 2 * log_ratio.square())
    return PolicyLoss(losses, {"approx_kl": -log_ratio.detach()})
