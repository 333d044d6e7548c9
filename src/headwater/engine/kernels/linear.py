"""Matrix products: ``invariant_linear`` for deterministic mode, ``split_linear`` to occupy the whole device.

``invariant_linear`` gives a row the same bits whatever other rows there are. It reads operands through tensor
descriptors, which fill out-of-range values with zeros, so tiles need no masks.

``split_linear`` cuts the sum over inputs into slices. With a few hundred rows, a product such as 8960 -> 1536 has fewer
result tiles than the device has multiprocessors. cuBLAS splits the sum too, but needs a separate launch to add the
parts. Here one batched product returns the parts in float32, and ``sum_add_rms_norm``, which follows anyway, adds them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_SLICE_MULTIPLE = 64
_TILE = 128
_MAX_TILES = 100
_MAX_SLICES = 5
_LONG_SUM = 4096


@dataclass(frozen=True)
class MatmulConfig:
    """Tile sizes of a product: tokens (m), outputs (n) and inputs (k)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def invariant_config(outputs: int, element_bytes: int) -> MatmulConfig:
    """The tiles depend only on the weight: the number of tokens must not change how a row is summed."""
    if element_bytes == 4:
        return MatmulConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
    block_n = 128 if outputs >= 8192 else 64
    return MatmulConfig(block_m=64, block_n=block_n, block_k=64, num_warps=4, num_stages=5)


@triton.jit
def _linear(
    x,
    weight,
    bias,
    out,
    num_tokens,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbouring programs share a tile of the weight, so it is read from memory once.
    first_token = tl.program_id(0) * BLOCK_M
    first_output = tl.program_id(1) * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, (num_inputs + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        tokens = x.load([first_token, k * BLOCK_K])
        outputs = weight.load([first_output, k * BLOCK_K])
        total = tl.dot(tokens, outputs.T, total, input_precision=PRECISION)

    rows = first_token + tl.arange(0, BLOCK_M)
    columns = first_output + tl.arange(0, BLOCK_N)
    mask = (rows < num_tokens)[:, None] & (columns < num_outputs)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[None, :]
    place = rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ weight.T + bias``, with every row summed in a fixed order that does not depend on the number of rows.

    Sums are float32. They are rounded to ``out_dtype``, by default the type of ``x``.
    """
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    assert inputs == weight.shape[1], f"x has {inputs} inputs and the weight {weight.shape[1]}"
    assert x.is_contiguous(), "x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    row_bytes = inputs * x.element_size()
    assert row_bytes % 16 == 0, f"rows of {row_bytes} bytes: tensor descriptors need a multiple of 16"
    config = invariant_config(outputs, x.element_size())
    out = torch.empty((tokens, outputs), dtype=out_dtype or x.dtype, device=x.device)
    _linear[(triton.cdiv(tokens, config.block_m), triton.cdiv(outputs, config.block_n))](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        out if bias is None else bias,
        out,
        tokens,
        outputs,
        inputs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


def suggest_slices(rows: int, outputs: int, inputs: int) -> int:
    """The number of slices that brings the result tiles close to the number of multiprocessors; 1 to not split.

    The best values measured on an H200: for 8960 -> 1536, 5 slices up to 128 rows, 4 at 256, 2 at 512 and 1 above; for
    1536 -> 1536, 2 slices up to 256 rows.
    """
    tiles = -(-rows // _TILE) * -(-outputs // _TILE)
    most = min(_MAX_TILES // tiles, _MAX_SLICES if inputs >= _LONG_SUM else 2)
    if inputs < _LONG_SUM and rows > 2 * _TILE:
        return 1
    return max((slices for slices in possible_slices(inputs) if slices <= most), default=1)


def possible_slices(inputs: int) -> list[int]:
    """Numbers of equal slices whose length is a multiple of what one step of the product reads."""
    return [slices for slices in range(1, 11) if inputs % (slices * _SLICE_MULTIPLE) == 0]


def split_linear(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    """The parts of ``x @ weight.T`` as float32 ``[slices, rows, outputs]``. Their sum is the product."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert inputs % slices == 0, f"slices = {slices}: must divide the {inputs} inputs"
    left = x.view(rows, slices, -1).transpose(0, 1)
    right = weight.view(outputs, slices, -1).permute(1, 2, 0)
    if x.dtype == torch.float32:
        return torch.bmm(left, right)
    if x.device.type == "cuda":
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())  # torch has no product with a wider result type on a CPU
