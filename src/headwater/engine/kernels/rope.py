"""Splits the merged qkv projection: optional head norms, rotary embedding and the cache write in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.engine.kernels.norm import scaled_norm


@triton.jit
def _rope_and_store(
    qkv,
    cos,
    sin,
    positions,
    slots,
    k_cache,
    v_cache,
    q_norm,
    k_norm,
    out,
    qkv_stride,
    cos_stride,
    sin_stride,
    page_stride,
    head_stride,
    token_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, HALF_PAD)
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    dims_mask = dims < HALF
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & dims_mask[None, :]

    source = qkv + token * qkv_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    raw_low = tl.load(source, mask=mask, other=0.0)
    raw_high = tl.load(source + HALF, mask=mask, other=0.0)
    # Both halves of a row of the tables are equal, so only the first is read.
    cosine = tl.load(cos + position * cos_stride + dims, mask=dims_mask, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + position * sin_stride + dims, mask=dims_mask, other=0.0).to(tl.float32)[None, :]

    dtype: tl.constexpr = raw_low.dtype
    low = raw_low.to(tl.float32)
    high = raw_high.to(tl.float32)
    if NORM:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF)
        inverse_rms = tl.rsqrt(mean + eps)[:, None]
        q_low = tl.load(q_norm + dims, mask=dims_mask, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + HALF + dims, mask=dims_mask, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + dims, mask=dims_mask, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + HALF + dims, mask=dims_mask, other=0.0).to(tl.float32)
        weight_low = tl.where(is_query[:, None], q_low[None, :], k_low[None, :])
        weight_high = tl.where(is_query[:, None], q_high[None, :], k_high[None, :])
        low = scaled_norm(low, inverse_rms, weight_low, dtype).to(tl.float32)
        high = scaled_norm(high, inverse_rms, weight_high, dtype).to(tl.float32)
    rotated_low = (low * cosine - high * sine).to(dtype)
    rotated_high = (high * cosine + low * sine).to(dtype)

    q_address = out + (token * NUM_HEADS + heads[:, None]) * (2 * HALF) + dims[None, :]
    tl.store(q_address, rotated_low, mask=is_query[:, None] & mask)
    tl.store(q_address + HALF, rotated_high, mask=is_query[:, None] & mask)
    place = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
    k_address = k_cache + place + (heads[:, None] - NUM_HEADS) * head_stride + dims[None, :]
    tl.store(k_address, rotated_low, mask=is_key[:, None] & mask)
    tl.store(k_address + HALF, rotated_high, mask=is_key[:, None] & mask)
    v_address = v_cache + place + (heads[:, None] - NUM_HEADS - NUM_KV_HEADS) * head_stride + dims[None, :]
    tl.store(v_address, raw_low, mask=is_value[:, None] & mask)
    tl.store(v_address + HALF, raw_high, mask=is_value[:, None] & mask)


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotate queries and keys of ``qkv`` [tokens, (heads + 2 kv_heads) * head_dim] and write keys and values to slots.

    ``cos`` and ``sin`` are tables over positions with ``head_dim`` or ``head_dim / 2`` columns. The rotation is
    computed in float32 and rounded once. Returns the queries [tokens, heads, head_dim].
    """
    kv_heads, page_tokens, head_dim = k_cache.shape[1:]
    tokens = qkv.shape[0]
    assert (q_norm is None) == (k_norm is None), "q_norm and k_norm are given together"
    assert head_dim % 2 == 0, f"head_dim = {head_dim}: rotary positions need an even number"
    assert qkv.shape[1] == (num_heads + 2 * kv_heads) * head_dim, f"qkv has {qkv.shape[1]} columns"
    assert qkv.stride(1) == 1, "qkv's rows must be contiguous"
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must have the same strides"
    assert k_cache.stride(3) == 1, "the cache's head_dim must be its innermost, contiguous dimension"
    out = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    heads_pad = triton.next_power_of_2(num_heads + 2 * kv_heads)
    half_pad = triton.next_power_of_2(head_dim // 2)
    _rope_and_store[(tokens,)](
        qkv,
        cos,
        sin,
        positions,
        slots,
        k_cache,
        v_cache,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        out,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEADS_PAD=heads_pad,
        HALF=head_dim // 2,
        HALF_PAD=half_pad,
        PAGE=page_tokens,
        NORM=q_norm is not None,
        num_warps=min(max(heads_pad * half_pad // 256, 1), 8),
    )
    return out
