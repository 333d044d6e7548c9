"""Truncated importance sampling: weights are clamped, which limits the influence of a single token."""

from __future__ import annotations

from typing import Annotated

from headwater.algorithms.corrections import (
    CORRECTIONS,
    Correction,
    CorrectionInputs,
    Level,
    Weighing,
    ratios,
)
from headwater.algorithms.masked import LogRatioLimit, keep
from headwater.config.constraints import AtLeast, MoreThan, NotBelow
from headwater.config.traits import CorrectionTraits


@CORRECTIONS.register(CorrectionTraits(weighs_by_ratio=True))
def truncate(
    inputs: CorrectionInputs,
    *,
    level: Level = "token",
    upper: Annotated[float, MoreThan(0, finite=False), NotBelow("lower")] = 2.0,
    lower: Annotated[float, AtLeast(0)] = 0.0,
    normalize: bool = False,
    max_log_ratio: LogRatioLimit = 20.0,
) -> Correction:
    """Weights are the ratios clamped to ``[lower, upper]``; ``normalize`` divides them by their mean over the
    batch."""
    ratio = ratios(inputs.log_ratio, inputs.mask, level, max_log_ratio)
    weights = keep(ratio.clamp(lower, upper), inputs.mask)
    diagnostics = {"truncated_fraction": (weights != ratio).to(ratio.dtype)}
    # Without a lower bound, the inverse of the upper one counts as low in metrics.
    weighing = Weighing(ratio, lower or 1 / upper, upper, level, weights, normalize)
    return Correction(weighing.weights(inputs.mask), inputs.mask, diagnostics, weighing)
