"""RMS norm, alone and fused with the residual addition before it.

Roundings follow transformers: float32 statistics, the normalised value rounded to the tensor's dtype, then the weight.
Gemma's norms, whose weights are stored minus one (``offset=1``), multiply in float32 and round once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scaled_norm(values, inverse_rms, weight, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """``values`` (float32) times the inverse RMS and the weight, rounded as the model family rounds."""
    normalised = values * inverse_rms
    if OFFSET == 0.0:
        normalised = normalised.to(dtype).to(tl.float32)
    return (normalised * (weight + OFFSET)).to(dtype)


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    dtype: tl.constexpr = values.dtype
    if ADD:
        address = residual + row * residual_stride + columns
        values = (values.to(tl.float32) + tl.load(address, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(address, values, mask=mask)
    wide = values.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    tl.store(out + row * SIZE + columns, scaled_norm(wide, inverse_rms, scale, OFFSET, dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The RMS norm of each row of ``x`` [tokens, hidden] times ``weight + offset``."""
    return _launch(x, None, weight, eps, offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Add ``x`` to ``residual`` in place, rounded to their dtype, and return the RMS norm of that sum."""
    assert residual.stride(-1) == 1, "residual's rows must be contiguous"
    assert residual.shape == x.shape, f"x is {tuple(x.shape)} and residual {tuple(residual.shape)}"
    return _launch(x, residual, weight, eps, offset)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
    tokens, hidden = x.shape
    assert x.stride(1) == 1, "x's rows must be contiguous"
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    _rms_norm[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=hidden,
        BLOCK=block,
        OFFSET=offset,
        ADD=residual is not None,
        # Eight values per thread make one 16-byte access in bfloat16.
        num_warps=min(max(block // 256, 1), 16),
    )
    return out
