"""RMS norm of a float32 residual stream for training on CUDA, fused with the addition before it.

    total, normed = add_and_norm(residual, product, weight, eps)      # total = residual + product, in float32

``normed`` has the type of ``weight`` and is rounded once. The backward pass adds the gradients of both results in one
pass, and also writes the gradient of ``product`` in its own type.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_PER_PROCESSOR = 4
"""Enough to hide the latency of memory. Each program sums the weight's gradient over its rows."""
_NUM_CPU_PROGRAMS = 3


@triton.jit
def _forward(
    residual,
    product,
    weight,
    total,
    normed,
    inverse_rms,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = row * SIZE + columns
    values = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_PRODUCT:
        values += tl.load(product + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + place, values, mask=mask)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    tl.store(inverse_rms + row, inverse)
    tl.store(normed + place, (values * inverse * scale).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    normed_gradient,
    total_gradient,
    total,
    inverse_rms,
    weight,
    residual_gradient,
    product_gradient,
    weight_parts,
    num_rows,
    rows_per_program,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    weight_gradient = tl.zeros([BLOCK], tl.float32)
    first = program * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, num_rows)):
        place = row * SIZE + columns
        upstream = tl.load(normed_gradient + place, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_rms + row)
        normalised = tl.load(total + place, mask=mask, other=0.0) * inverse
        weight_gradient += upstream * normalised
        scaled = upstream * scale
        along = tl.sum(scaled * normalised, axis=0) / SIZE
        gradient = (scaled - normalised * along) * inverse
        if HAS_TOTAL:
            gradient += tl.load(total_gradient + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_gradient + place, gradient, mask=mask)
        if HAS_PRODUCT:
            tl.store(product_gradient + place, gradient.to(product_gradient.dtype.element_ty), mask=mask)
    tl.store(weight_parts + program * SIZE + columns, weight_gradient, mask=mask)


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, product: Tensor | None, weight: Tensor, eps: float):
        size = residual.shape[-1]
        residual = residual.contiguous()
        num_rows = residual.numel() // size
        total = residual if product is None else torch.empty_like(residual)
        normed = torch.empty(residual.shape, dtype=weight.dtype, device=residual.device)
        inverse_rms = torch.empty(num_rows, dtype=torch.float32, device=residual.device)
        _forward[(num_rows,)](
            residual,
            residual if product is None else product.contiguous(),
            weight,
            total,
            normed,
            inverse_rms,
            eps,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            HAS_PRODUCT=product is not None,
            num_warps=_num_warps(size),
        )
        ctx.save_for_backward(total, weight, inverse_rms)
        ctx.product_type = None if product is None else product.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, total_gradient: Tensor | None, normed_gradient: Tensor | None):
        total, weight, inverse_rms = ctx.saved_tensors
        if normed_gradient is None:
            product_gradient = None
            if total_gradient is not None and ctx.product_type is not None:
                product_gradient = total_gradient.to(ctx.product_type)
            return total_gradient, product_gradient, None, None
        size, num_rows = total.shape[-1], len(inverse_rms)
        num_programs = min(num_rows, _num_programs(total.device))
        residual_gradient = torch.empty_like(total)
        product_gradient = None
        if ctx.product_type is not None:
            product_gradient = torch.empty(total.shape, dtype=ctx.product_type, device=total.device)
        weight_parts = torch.empty((num_programs, size), dtype=torch.float32, device=total.device)
        _backward[(num_programs,)](
            normed_gradient.contiguous(),
            residual_gradient if total_gradient is None else total_gradient.contiguous(),
            total,
            inverse_rms,
            weight,
            residual_gradient,
            residual_gradient if product_gradient is None else product_gradient,
            weight_parts,
            num_rows,
            triton.cdiv(num_rows, num_programs),
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            HAS_PRODUCT=product_gradient is not None,
            HAS_TOTAL=total_gradient is not None,
            num_warps=_num_warps(size),
        )
        weight_gradient = weight_parts.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return residual_gradient, product_gradient, weight_gradient, None


def add_and_norm(residual: Tensor, product: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual`` (float32) plus ``product``, and the RMS norm of the sum in the type of ``weight``."""
    assert residual.dtype == torch.float32, f"the residual is {residual.dtype}"
    total, normed = _AddAndNorm.apply(residual, product, weight, eps)
    return total, normed


def _num_warps(size: int) -> int:
    # Four float32 values per thread are one 16-byte access.
    return min(max(int(triton.next_power_of_2(size)) // 256, 1), 16)


@cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _NUM_CPU_PROGRAMS
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)
