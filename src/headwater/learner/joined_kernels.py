"""Kernels for the operations between joined products (``joined_layers``), for training on CUDA.

``rotated_heads`` separates queries, keys and values that one product has computed, and rotates the first two in
float32, rounded once. ``gated`` computes ``silu(gate) * up`` of ``[tokens, 2 * width]``, gate first. SiLU is rounded
before it is multiplied, as in the layers of transformers and in the engine. Each backward pass writes all its gradients
into one tensor, for the products that follow.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4
_BLOCK = 1024


@triton.jit
def _rotate(
    joined,
    query,
    key,
    value,
    cos,
    sin,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
):
    """One token. The backward pass reads what the forward pass writes, and rotates the other way."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    column = tl.arange(0, HALF_PAD)[None, :]
    fits = column < HALF
    is_query = (head < HEADS) & fits
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS) & fits
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS) & fits
    is_any = (head < HEADS + 2 * KV_HEADS) & fits
    at_joined = joined + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + column
    at_query = query + (token * HEADS + head) * (2 * HALF) + column
    at_key = key + (token * KV_HEADS + head - HEADS) * (2 * HALF) + column
    at_value = value + (token * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + column
    # The second halves of the tables repeat the first ones.
    cosine = tl.load(cos + token * (2 * HALF) + column, mask=fits, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * (2 * HALF) + column, mask=fits, other=0.0).to(tl.float32)
    if IS_BACKWARD:
        sine = -sine
        low = tl.load(at_query, mask=is_query, other=0.0).to(tl.float32)
        low += tl.load(at_key, mask=is_key, other=0.0).to(tl.float32)
        low += tl.load(at_value, mask=is_value, other=0.0).to(tl.float32)
        high = tl.load(at_query + HALF, mask=is_query, other=0.0).to(tl.float32)
        high += tl.load(at_key + HALF, mask=is_key, other=0.0).to(tl.float32)
        high += tl.load(at_value + HALF, mask=is_value, other=0.0).to(tl.float32)
    else:
        low = tl.load(at_joined, mask=is_any, other=0.0).to(tl.float32)
        high = tl.load(at_joined + HALF, mask=is_any, other=0.0).to(tl.float32)
    new_low = tl.where(is_value, low, low * cosine - high * sine).to(joined.dtype.element_ty)
    new_high = tl.where(is_value, high, high * cosine + low * sine).to(joined.dtype.element_ty)
    if IS_BACKWARD:
        tl.store(at_joined, new_low, mask=is_any)
        tl.store(at_joined + HALF, new_high, mask=is_any)
    else:
        tl.store(at_query, new_low, mask=is_query)
        tl.store(at_query + HALF, new_high, mask=is_query)
        tl.store(at_key, new_low, mask=is_key)
        tl.store(at_key + HALF, new_high, mask=is_key)
        tl.store(at_value, new_low, mask=is_value)
        tl.store(at_value + HALF, new_high, mask=is_value)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, head_dim = len(joined), cos.shape[-1]
        joined, cos, sin = joined.contiguous(), cos.contiguous(), sin.contiguous()
        query = joined.new_empty(num_tokens, num_heads, head_dim)
        key, value = (joined.new_empty(num_tokens, num_kv_heads, head_dim) for _ in range(2))
        _launch_rotation(joined, query, key, value, cos, sin, is_backward=False)
        ctx.save_for_backward(cos, sin)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        query, key, value = (each.contiguous() for each in gradients)
        joined = query.new_empty(len(query), (query.shape[1] + 2 * key.shape[1]) * query.shape[2])
        _launch_rotation(joined, query, key, value, cos, sin, is_backward=True)
        return joined, None, None, None, None


def _launch_rotation(
    joined: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_tokens:
        _rotate[(num_tokens,)](
            joined,
            query,
            key,
            value,
            cos,
            sin,
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HEADS_PAD=triton.next_power_of_2(num_heads + 2 * num_kv_heads),
            HALF_PAD=triton.next_power_of_2(head_dim // 2),
            IS_BACKWARD=is_backward,
            num_warps=_WARPS,
        )


def rotated_heads(
    joined: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``joined`` is ``[tokens, heads * head dim]`` of queries, keys and values; the tables are ``[tokens, head dim]``.

    The results are ``[tokens, heads, head dim]`` in the type of ``joined``.
    """
    query, key, value = _RotatedHeads.apply(joined, cos, sin, num_heads, num_kv_heads)
    return query, key, value


@triton.jit
def _gate(gate_up, result, SIZE: tl.constexpr, BLOCK: tl.constexpr):
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
def _gate_backward(gate_up, upstream, gradient, SIZE: tl.constexpr, BLOCK: tl.constexpr):
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
        _launch_gate(_gate, gate_up, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient = torch.empty_like(gate_up)
        _launch_gate(_gate_backward, gate_up, gradients[0].contiguous(), gradient)
        return gradient


def _launch_gate(kernel: Any, gate_up: Tensor, *others: Tensor) -> None:
    size = gate_up.shape[-1] // 2
    num_rows = gate_up.numel() // (2 * size)
    if num_rows:
        kernel[(num_rows, triton.cdiv(size, _BLOCK))](gate_up, *others, SIZE=size, BLOCK=_BLOCK, num_warps=_WARPS)


def gated(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, in the type of ``gate_up``."""
    result: Tensor = _Gated.apply(gate_up)
    return result
