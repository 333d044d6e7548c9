"""IcePop: weights outside the bounds become 0 instead of being clamped."""

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
def icepop(
    inputs: CorrectionInputs,
    *,
    level: Level = "token",
    lower: Annotated[float, AtLeast(0)] = 0.5,
    upper: Annotated[float, MoreThan(0, finite=False), NotBelow("lower")] = 5.0,
    normalize: bool = False,
    max_log_ratio: LogRatioLimit = 20.0,
) -> Correction:
    """Weights are the ratios inside ``[lower, upper]`` and 0 outside. The mask stays, so averages count all tokens."""
    ratio = ratios(inputs.log_ratio, inputs.mask, level, max_log_ratio)
    inside = (ratio >= lower) & (ratio <= upper)
    diagnostics = {"outside_fraction": keep((~inside).to(ratio.dtype), inputs.mask)}
    weighing = Weighing(ratio, lower, upper, level, keep(ratio, inside), normalize)
    return Correction(weighing.weights(inputs.mask), inputs.mask, diagnostics, weighing)
