"""``silu(gate) * up`` for training on CUDA, of gate and up that one product has computed.

``gated(gate_up)`` takes ``[tokens, 2 * width]``, gate first. SiLU is rounded before it is multiplied, as in the layers
of transformers and in the engine. The gradient of both halves is written into one tensor, for the products that follow.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _forward(gate_up, result, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = gate_up + row * (2 * SIZE) + columns
    gate = tl.load(place, mask=mask, other=0.0)
    up = tl.load(place + SIZE, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(result + row * SIZE + columns, (activated * up).to(gate.dtype), mask=mask)


@triton.jit
def _backward(gate_up, upstream, gradient, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    offset = row * (2 * SIZE) + columns
    gate = tl.load(gate_up + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + offset + SIZE, mask=mask, other=0.0).to(tl.float32)
    given = tl.load(upstream + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    activated = gate * share
    of_gate = given * up * (share + activated * (1.0 - share))
    tl.store(gradient + offset, of_gate.to(gradient.dtype.element_ty), mask=mask)
    tl.store(gradient + offset + SIZE, (given * activated).to(gradient.dtype.element_ty), mask=mask)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        *shape, width = gate_up.shape
        result = torch.empty((*shape, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        ctx.save_for_backward(gate_up)
        _launch(_forward, gate_up, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient = torch.empty_like(gate_up)
        _launch(_backward, gate_up, gradients[0].contiguous(), gradient)
        return gradient


def _launch(kernel: Any, gate_up: Tensor, *others: Tensor) -> None:
    size = gate_up.shape[-1] // 2
    num_rows = gate_up.numel() // (2 * size)
    if num_rows:
        kernel[(num_rows, triton.cdiv(size, _BLOCK))](gate_up, *others, SIZE=size, BLOCK=_BLOCK, num_warps=_WARPS)


def gated(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, in the type of ``gate_up``."""
    result: Tensor = _Gated.apply(gate_up)
    return result
