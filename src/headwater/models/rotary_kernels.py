"""Queries, keys and values for training on CUDA, from one product: separated, and rotated where they need to be.

``rotated_heads`` rotates in float32 and rounds once. Its backward pass writes the gradients of all three into one
tensor, for the products that follow.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 4


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
        _launch(joined, query, key, value, cos, sin, is_backward=False)
        ctx.save_for_backward(cos, sin)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        query, key, value = (each.contiguous() for each in gradients)
        joined = query.new_empty(len(query), (query.shape[1] + 2 * key.shape[1]) * query.shape[2])
        _launch(joined, query, key, value, cos, sin, is_backward=True)
        return joined, None, None, None, None


def _launch(
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
