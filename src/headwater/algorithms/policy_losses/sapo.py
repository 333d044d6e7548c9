"""SAPO: a smooth gate instead of the clip."""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from headwater.algorithms.masked import Aggregation, LogRatioLimit, row_mean
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs, log_ratios
from headwater.config.constraints import MoreThan
from headwater.config.traits import LossTraits


@POLICY_LOSSES.register(LossTraits(own_aggregation="seq-mean-token-mean"))
def sapo(
    inputs: PolicyLossInputs,
    *,
    tau_positive: Annotated[float, MoreThan(0)] = 1.0,
    tau_negative: Annotated[float, MoreThan(0)] = 1.05,
    ratio_level: Literal["token", "sequence"] = "token",
    aggregation: Aggregation | None = "seq-mean-token-mean",
    max_log_ratio: LogRatioLimit = 20.0,
) -> PolicyLoss:
    """``-A·gate`` with ``gate = sigmoid(tau·(r - 1))·4/tau``, ``tau`` by the sign of ``A``.

    At sequence level ``r`` is the geometric mean of the ratios of the row and ``A`` its mean. A larger tau reduces the
    gradient of tokens far from the old policy faster. The default aggregation is that of verl; with
    ``aggregation: null`` the configured one is used, as in AReaL.
    """
    log_ratio, advantages = log_ratios(inputs, max_log_ratio), inputs.advantages
    if ratio_level == "sequence":
        log_ratio, advantages = row_mean(log_ratio, inputs.mask), row_mean(advantages, inputs.mask)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    diagnostics = {"soft_gate": gate.detach(), "approx_kl": -log_ratio.detach()}
    return PolicyLoss(-advantages * gate, diagnostics, aggregation)
