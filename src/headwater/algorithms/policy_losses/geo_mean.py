"""GMPO: the geometric mean of clipped token ratios, one loss per sequence."""

from __future__ import annotations

from typing import Annotated

import torch

from headwater.algorithms.masked import ROW_MEAN, LogRatioLimit, masked_mean
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, log_ratios
from headwater.config.constraints import AtLeast
from headwater.config.traits import LossTraits


@POLICY_LOSSES.register(LossTraits(own_aggregation="seq-mean-token-mean"))
def geo_mean(
    inputs: PolicyLossInputs,
    *,
    clip_low: Annotated[float, AtLeast(0)] = 0.4,
    clip_high: Annotated[float, AtLeast(0)] = 0.4,
    max_log_ratio: LogRatioLimit = None,
) -> PolicyLoss:
    """``-mean(A)·exp(mean of the log ratios)``, each **log** ratio clipped to ``[-low, high]`` on its adverse side.

    Every token of a row has the loss of the row, and the loss of a step is the mean over all rows: as
    ``seq-mean-token-mean``, but rows without a trained token count too, with loss 0. A correction weighs a row by the
    geometric mean of its token weights.
    """
    log_ratio = log_ratios(inputs, max_log_ratio)
    clamped = log_ratio.clamp(-clip_low, clip_high)
    sign = inputs.advantages.sign()
    adverse = sign * torch.minimum(sign * log_ratio, sign * clamped)
    ratio = masked_mean(adverse, inputs.mask, dim=-1).exp()
    losses = -masked_mean(inputs.advantages, inputs.mask, dim=-1) * ratio
    outside = log_ratio != clamped
    diagnostics = {
        "clip_fraction": (outside & (sign > 0)).to(ratio.dtype),
        "clip_fraction_negative": (outside & (sign < 0)).to(ratio.dtype),
        "approx_kl": -log_ratio.detach(),
    }
    return PolicyLoss(losses[:, None].expand_as(log_ratio), diagnostics, ROW_MEAN, per_sequence=True)
