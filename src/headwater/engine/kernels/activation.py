"""The gated activation of merged projections. Like transformers, it rounds between activation and product."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MAX_ROWS = 65535
"""Limit of the second dimension of a grid."""


@triton.jit
def _silu_and_mul(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    address = gate_up + row * row_stride + columns
    gate = tl.load(address, mask=mask, other=0.0)
    up = tl.load(address + SIZE, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = wide / (1.0 + tl.exp(-wide))
    result = activated.to(gate.dtype).to(tl.float32) * up
    tl.store(out + row * SIZE + columns, result.to(gate.dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up`` [tokens, 2 * intermediate], gate first."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "gate_up's rows must be contiguous"
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    # Tokens are the second dimension of the grid, which is limited. Only a vision tower has more of them.
    for start in range(0, tokens, _MAX_ROWS):
        rows = gate_up[start : start + _MAX_ROWS]
        _silu_and_mul[(triton.cdiv(size, _BLOCK), len(rows))](
            rows, out[start:], gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4
        )
    return out
