"""Rotary embedding of the queries and keys of a vision tower, in place, in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_heads(
    qkv,
    cos,
    sin,
    row_stride,
    NUM_ROTATED: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, HALF_PAD)
    dims_mask = dims < HALF
    mask = (heads < NUM_ROTATED)[:, None] & dims_mask[None, :]
    address = qkv + row * row_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(address, mask=mask, other=0.0)
    high = tl.load(address + HALF, mask=mask, other=0.0)
    dtype: tl.constexpr = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    cosine = tl.load(cos + row * HALF + dims, mask=dims_mask, other=0.0)[None, :]
    sine = tl.load(sin + row * HALF + dims, mask=dims_mask, other=0.0)[None, :]
    tl.store(address, (low * cosine - high * sine).to(dtype), mask=mask)
    tl.store(address + HALF, (high * cosine + low * sine).to(dtype), mask=mask)


def rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> None:
    """Rotate the first ``num_rotated`` heads of every row of ``qkv`` [patches, heads, head dim], in place.

    ``cos`` and ``sin`` are [patches, head dim / 2] in float32. The result is rounded once.
    """
    num_rows, num_heads, head_dim = qkv.shape
    half = head_dim // 2
    assert num_rotated <= num_heads, f"{num_rotated} of {num_heads} heads"
    assert qkv.stride()[1:] == (head_dim, 1), "qkv's rows must be contiguous"
    assert cos.shape == sin.shape == (num_rows, half), f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}"
    assert cos.stride() == sin.stride() == (half, 1), "cos and sin must be contiguous"
    heads_pad, half_pad = triton.next_power_of_2(num_rotated), triton.next_power_of_2(half)
    _rotate_heads[(num_rows,)](
        qkv,
        cos,
        sin,
        qkv.stride(0),
        NUM_ROTATED=num_rotated,
        HEADS_PAD=heads_pad,
        HALF=half,
        HALF_PAD=half_pad,
        num_warps=min(max(heads_pad * half_pad // 256, 1), 8),
    )
