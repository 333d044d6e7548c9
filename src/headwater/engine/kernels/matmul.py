"""``invariant_linear``: a matrix product that gives a row the same bits whatever rows stand beside it.

Operands are read through tensor descriptors, which fill what lies outside with zeros, so tiles need no masks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class MatmulConfig:
    """How a product is cut: tiles of tokens (m), of outputs (n) and of inputs (k)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def invariant_config(outputs: int, element_bytes: int) -> MatmulConfig:
    """Depends on the weight alone: the number of tokens must not change how a row is summed."""
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
    # Neighbouring programs share a tile of the weight, so it comes from memory once.
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


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with every row summed in one fixed order, whatever the number of rows."""
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    assert inputs == weight.shape[1], f"x has {inputs} inputs and the weight {weight.shape[1]}"
    assert x.is_contiguous(), "x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    row_bytes = inputs * x.element_size()
    assert row_bytes % 16 == 0, f"rows of {row_bytes} bytes: tensor descriptors need a multiple of 16"
    config = invariant_config(outputs, x.element_size())
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
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
