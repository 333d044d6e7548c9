"""M2PO: bounds the second moment of the log ratio by dropping the tokens with the largest log ratios."""

from __future__ import annotations

from typing import Annotated

import torch

from headwater.algorithms.corrections import CORRECTIONS, Correction, CorrectionInputs
from headwater.config.constraints import MoreThan


@CORRECTIONS.register
def m2po(inputs: CorrectionInputs, *, threshold: Annotated[float, MoreThan(0)] = 0.04) -> Correction:
    """Drop the tokens of largest ``(log r)²`` until the mean of the rest is below ``threshold``; one token always
    stays."""
    kept_index = inputs.mask.flatten().nonzero()[:, 0]
    squares, order = inputs.log_ratio.flatten()[kept_index].square().sort()
    # On the CPU, where the sum always has the same order. The device has to be waited for anyway.
    below = squares.cpu().cumsum(dim=0) / torch.arange(1, len(squares) + 1) < threshold
    # The running means of sorted squares never fall, so the number below the threshold is the number that may stay.
    num_kept = max(int(below.sum()), 1)
    mask = torch.zeros_like(inputs.mask).flatten()
    mask[kept_index[order[:num_kept]]] = 1
    mask = mask.view_as(inputs.mask)
    return Correction(mask, mask, {"rejected_fraction": inputs.mask - mask})
