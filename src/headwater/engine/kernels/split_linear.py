"""Products of a decode step whose sum over inputs is cut into slices, so that they occupy the whole device.

With a few hundred rows a product such as 8960 -> 1536 has fewer tiles of results than the device has multiprocessors.
The vendor's library cuts the sum as well, but then adds the parts in a launch of its own. Here one batched product
leaves the parts in float32, and the residual addition and norm that follow (``sum_add_rms_norm``) add them on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SLICE_MULTIPLE = 64
_TILE = 128
_MAX_TILES = 100
_MAX_SLICES = 5
_LONG_SUM = 4096


def suggest_slices(rows: int, outputs: int, inputs: int) -> int:
    """As many slices as bring the tiles of results near the number of multiprocessors; 1 where cutting does not pay.

    Measured on an H200: 8960 -> 1536 wants 5 slices up to 128 rows, 4 at 256, 2 at 512 and 1 beyond; 1536 -> 1536 wants
    2 up to 256 rows.
    """
    tiles = -(-rows // _TILE) * -(-outputs // _TILE)
    most = min(_MAX_TILES // tiles, _MAX_SLICES if inputs >= _LONG_SUM else 2)
    if inputs < _LONG_SUM and rows > 2 * _TILE:
        return 1
    return max((slices for slices in possible_slices(inputs) if slices <= most), default=1)


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
