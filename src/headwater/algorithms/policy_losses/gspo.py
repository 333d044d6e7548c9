"""GSPO: clips the ratio of a sequence, the geometric mean of its token ratios."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.masked import masked_mean
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, clipped_surrogate
from headwater.config.constraints import AtLeast

_MAX_LOG_RATIO = 10.0


@POLICY_LOSSES.register
def gspo(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, AtLeast(0)] = 3e-4,
    clip_high: Annotated[float, AtLeast(0)] = 4e-4,
) -> PolicyLoss:
    """PPO's clip on ``exp(mean of logp - old)``, without the dual clip; intended for ``seq-mean-token-mean``.

    The bounds are much smaller than PPO's, because a mean over a sequence moves much less than a single token.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    sequence = masked_mean(log_ratio, inputs.mask, dim=-1).detach()[:, None]
    # The value is that of the sequence; the gradient goes through the log-prob of each token.
    own = inputs.logprobs - inputs.logprobs.detach() + sequence
    ratio = own.clamp(max=_MAX_LOG_RATIO).exp()
    losses, clipped = clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high)
    return PolicyLoss(losses, {"clip_fraction": clipped, "approx_kl": -log_ratio.detach()})
