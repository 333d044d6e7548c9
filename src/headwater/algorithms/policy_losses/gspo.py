"""GSPO: clips the ratio of a sequence, the geometric mean of its token ratios."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.masked import LogRatioLimit, masked_mean
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, clipped_surrogate
from headwater.config.constraints import AtLeast


@POLICY_LOSSES.register
def gspo(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, AtLeast(0)] = 3e-4,
    clip_high: Annotated[float, AtLeast(0)] = 4e-4,
    max_log_ratio: LogRatioLimit = 10.0,
) -> PolicyLoss:
    """PPO's clip on ``exp(mean of logp - old)``, without the dual clip; intended for ``seq-mean-token-mean``.

    The bounds are much smaller than PPO's, because a mean over a sequence moves much less than a single token. The mean
    log ratio is at most ``max_log_ratio``; it is not limited below.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    sequence = masked_mean(log_ratio, inputs.mask, dim=-1).detach()[:, None]
    # The value is that of the sequence; the gradient goes through the log-prob of each token.
    own = inputs.logprobs - inputs.logprobs.detach() + sequence
    ratio = (own if max_log_ratio is None else own.clamp(max=max_log_ratio)).exp()
    losses, clipped = clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high)
    return PolicyLoss(losses, {"clip_fraction": clipped, "approx_kl": -log_ratio.detach()})
