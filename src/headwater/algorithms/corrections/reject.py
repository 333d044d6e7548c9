"""Rejection: removes tokens or whole sequences from the loss whose ratio is too far from 1."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from headwater.algorithms.corrections import CORRECTIONS, Correction, CorrectionInputs, ratios
from headwater.algorithms.masked import LogRatioLimit, bounded, keep
from headwater.config.constraints import AtLeast, NotBelow
from headwater.config.traits import CorrectionTraits

Metric = Literal["ratio", "ratio_reverse", "k1", "k2", "k3", "k3_reverse"]
Reduction = Literal["sum", "mean", "max"]


@CORRECTIONS.register(CorrectionTraits(weighs_by_ratio="weighted"))
def reject(
    inputs: CorrectionInputs,
    *,
    level: Literal["token", "sequence"] = "token",
    metric: Metric = "ratio",
    reduction: Reduction = "mean",
    lower: float | None = None,
    upper: Annotated[float, AtLeast(0, finite=False), NotBelow("lower")] = 2.0,
    weighted: bool = False,
    max_log_ratio: LogRatioLimit = 20.0,
) -> Correction:
    """Keep tokens or sequences whose metric is in ``[lower, upper]``, bounds included.

    With ``r = π_train / π_rollout`` the metrics are ``ratio`` r, ``ratio_reverse`` 1/r, ``k1`` log r, ``k2``
    (log r)²/2, ``k3`` r - 1 - log r (the unbiased KL of samples from the rollout) and ``k3_reverse`` 1/r - 1 + log r.
    The metric of a sequence is the sum, mean or maximum over its tokens. For ratios it is computed in logs, so a mean
    is the geometric mean. Weights are 1, or with ``weighted`` the ratio: the geometric mean if sequences are judged by
    their ratio, else that of each token.
    """
    log_ratio = bounded(inputs.log_ratio, max_log_ratio)
    is_ratio = metric in ("ratio", "ratio_reverse")
    measured = _measure(log_ratio, metric)
    if level == "sequence":
        measured = _reduce(measured, inputs.mask, reduction)
    if is_ratio:
        measured = measured.exp()
    inside = measured <= upper
    if lower is not None:
        inside = inside & (measured >= lower)
    kept = keep(inputs.mask, inside.expand_as(inputs.mask))
    by_sequence = level == "sequence" and is_ratio
    weights = ratios(log_ratio, inputs.mask, "geometric" if by_sequence else "token", None) if weighted else kept
    diagnostics = {"rejected_fraction": inputs.mask - kept, "measured": keep(measured.expand_as(kept), inputs.mask)}
    return Correction(keep(weights, kept), kept, diagnostics)


def _measure(log_ratio: Tensor, metric: Metric) -> Tensor:
    """The metric of each token; for ratios, its logarithm."""
    if metric in ("ratio", "k1"):
        return log_ratio
    if metric == "ratio_reverse":
        return -log_ratio
    if metric == "k2":
        return log_ratio.square() / 2
    if metric == "k3":
        return log_ratio.exp() - 1 - log_ratio
    return (-log_ratio).exp() - 1 + log_ratio


def _reduce(values: Tensor, mask: Tensor, reduction: Reduction) -> Tensor:
    """``[samples, 1]``; a sequence without tokens measures 0."""
    if reduction == "max":
        highest = values.masked_fill(mask == 0, -torch.inf).amax(dim=-1, keepdim=True)
        return highest.masked_fill((mask == 0).all(dim=-1, keepdim=True), 0.0)
    total = keep(values, mask).sum(dim=-1, keepdim=True)
    return total if reduction == "sum" else total / mask.sum(dim=-1, keepdim=True).clamp(min=1)
