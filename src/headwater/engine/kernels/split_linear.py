"""Products of a decode step whose sum over inputs is cut into slices, so that they occupy the whole device.

With a few hundred rows a product such as 8960 -> 1536 has fewer tiles of results than the device has multiprocessors.
The vendor's library cuts the sum as well, but then adds the parts in a launch of its own. Here one batched product
leaves the parts in float32, and the residual addition and norm that follow (``sum_add_rms_norm``) add them on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 512
"""With more rows there are tiles enough without slices."""

_SLICE_MULTIPLE = 64
_TILE_OUTPUTS = 128
_MIN_SLICED_INPUTS = 4096
_NUM_PROCESSORS = 132


def suggest_slices(rows: int, outputs: int, inputs: int) -> int:
    """As many slices as still fit the device in one wave of tiles; 1 where cutting does not pay."""
    if rows > MAX_ROWS or inputs < _MIN_SLICED_INPUTS:
        return 1
    tiles = -(-rows // 128) * -(-outputs // _TILE_OUTPUTS)
    fitting = (slices for slices in possible_slices(inputs) if slices * tiles <= _NUM_PROCESSORS)
    return max(fitting, default=1)


def possible_slices(inputs: int) -> list[int]:
    """Numbers of equal slices whose length is a multiple of what a step of the product reads."""
    return [slices for slices in range(1, 11) if inputs % (slices * _SLICE_MULTIPLE) == 0]


def split_linear(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    """The parts of ``x @ weight.T``, float32 ``[slices, rows, outputs]``; their sum is the product."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert inputs % slices == 0, f"slices = {slices}: must divide the {inputs} inputs"
    left = x.view(rows, slices, -1).transpose(0, 1)
    right = weight.view(outputs, slices, -1).permute(1, 2, 0)
    if x.dtype == torch.float32:
        return torch.bmm(left, right)
    if x.device.type == "cuda":
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())  # the CPU has no product with a wider result
