"""RMS norm, alone and fused with the operations before it: the residual addition, and the sum of a product's parts.

Rounding follows transformers: float32 statistics, the normalised value rounded to the tensor's dtype, then the weight.
A float32 residual with narrower weights is not rounded at all, and its norm once, to the type of the weight.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scaled_norm(values, inverse_rms, weight, dtype: tl.constexpr):
    """``values`` (float32) times the inverse RMS and the weight, rounded after each."""
    normalised = (values * inverse_rms).to(dtype).to(tl.float32)
    return (normalised * weight).to(dtype)


@triton.jit
def _rms_norm(
    x,
    bias,
    residual,
    weight,
    out,
    part_stride,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    source = x + row * x_stride + columns
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(PARTS - 1):
        source += part_stride
        values += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    if not WIDE:
        # Round before the addition, as if the product had been written to memory first.
        values = values.to(dtype).to(tl.float32)
    if ADD:
        address = residual + row * residual_stride + columns
        values += tl.load(address, mask=mask, other=0.0).to(tl.float32)
        if not WIDE:
            values = values.to(dtype).to(tl.float32)
        tl.store(address, values.to(residual.dtype.element_ty), mask=mask)
    inverse_rms = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    if WIDE:  # noqa: SIM108  each program is compiled with one of the two
        normed = (values * inverse_rms * scale).to(dtype)
    else:
        normed = scaled_norm(values, inverse_rms, scale, dtype)
    tl.store(out + row * SIZE + columns, normed, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of each row of ``x`` [tokens, hidden] times ``weight``, in the type of ``weight``."""
    return _launch(x[None], None, None, weight, eps, x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x`` to ``residual`` in place, rounded to its dtype, and return the RMS norm of that sum."""
    return _launch(x[None], None, residual, weight, eps, residual.dtype)


def sum_add_rms_norm(parts: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``add_rms_norm`` of the sum of ``parts`` [parts, tokens, hidden] and bias, rounded to the residual's dtype."""
    return _launch(parts, bias, residual, weight, eps, residual.dtype)


def _launch(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    stream_dtype: torch.dtype,
) -> Tensor:
    """``stream_dtype`` is the type of the sum whose norm is taken."""
    num_parts, tokens, hidden = parts.shape
    assert parts.stride(2) == 1, "x's rows must be contiguous"
    if residual is not None:
        assert residual.stride(-1) == 1, "residual's rows must be contiguous"
        assert residual.shape == parts.shape[1:], f"x is {tuple(parts.shape)} and residual {tuple(residual.shape)}"
    out = torch.empty((tokens, hidden), dtype=weight.dtype, device=parts.device)
    block = triton.next_power_of_2(hidden)
    _rms_norm[(tokens,)](
        parts,
        weight if bias is None else bias,
        out if residual is None else residual,
        weight,
        out,
        parts.stride(0),
        parts.stride(1),
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=hidden,
        BLOCK=block,
        PARTS=num_parts,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        WIDE=stream_dtype != weight.dtype,
        # Eight values per thread are one 16-byte access in bfloat16.
        num_warps=min(max(block // 256, 1), 16),
    )
    return out
