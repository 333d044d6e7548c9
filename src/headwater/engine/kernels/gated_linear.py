"""Gate and up of deterministic mode in one kernel with SiLU.

A program computes the two members of each pair and applies the activation before anything is written, which saves a
launch and a round trip through memory. Operands are read through tensor descriptors, and sums are those of
``invariant_linear``: a row has the same bits whatever other rows there are. Values are rounded at the same places as by
separate kernels: the product, SiLU and its product with up.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.engine.kernels.linear import MatmulConfig, check_operands, invariant_config


@triton.jit
def _biased(total, bias, first_output, num_outputs, BLOCK_P: tl.constexpr):
    # Lanes beyond the last pair read values of other pairs or of the last one, and are not stored.
    outputs = tl.minimum(first_output + tl.arange(0, BLOCK_P), num_outputs - 1)
    return total + tl.load(bias + outputs).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _gated_linear(
    x, weight, bias, out, num_rows, num_pairs, num_inputs,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share a tile of the weight, so it is read from memory once.
    first_row, first_pair = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_P
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    for k in tl.range(0, (num_inputs + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        tile = x.load([first_row, k * BLOCK_K])
        gate_weight = weight.load([first_pair, k * BLOCK_K])
        up_weight = weight.load([num_pairs + first_pair, k * BLOCK_K])
        gate = tl.dot(tile, gate_weight.T, gate, input_precision=PRECISION)
        up = tl.dot(tile, up_weight.T, up, input_precision=PRECISION)
    if HAS_BIAS:
        gate = _biased(gate, bias, first_pair, 2 * num_pairs, BLOCK_P)
        up = _biased(up, bias, num_pairs + first_pair, 2 * num_pairs, BLOCK_P)
    wide = gate.to(dtype).to(tl.float32)
    activated = wide / (1.0 + tl.exp(-wide))
    result = activated.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    rows, pairs = first_row + tl.arange(0, BLOCK_M), first_pair + tl.arange(0, BLOCK_P)
    mask = (rows < num_rows)[:, None] & (pairs < num_pairs)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * num_pairs + pairs[None, :], result.to(dtype), mask=mask)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, config: MatmulConfig | None = None) -> Tensor:
    """``silu(gate) * up`` of ``x`` [rows, hidden] and the merged ``weight`` [2 * intermediate, hidden], gate first."""
    check_operands(x, weight)
    config = config or invariant_config(x, len(weight))
    rows, size, pairs_per_tile = len(x), len(weight) // 2, config.block_n // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    _gated_linear[(triton.cdiv(rows, config.block_m), triton.cdiv(size, pairs_per_tile))](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [pairs_per_tile, config.block_k]),
        x if bias is None else bias,
        out,
        rows,
        size,
        x.shape[1],
        HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_P=pairs_per_tile,
        BLOCK_K=config.block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out
