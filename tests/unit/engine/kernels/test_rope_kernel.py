"""Rotary positions, head norms and the cache write."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import DEVICE, HALF, randn

from headwater.engine.kernels.rope import rope_and_store

EPS = 1e-6


def tables(positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(positions)[:, None] * frequencies[None, :]
    angles = torch.cat([angles, angles], dim=-1).to(DEVICE)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return (x.float() * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]).to(x.dtype)


def head_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def test_queries_are_returned_and_keys_and_values_stored():
    for dtype, normed, heads, kv_heads, head_dim, half_tables in [
        (torch.float32, False, 12, 2, 128, False),
        (torch.float32, True, 9, 3, 24, True),
        (HALF, True, 12, 2, 128, True),
        (HALF, False, 9, 3, 24, False),
    ]:
        with case(dtype, normed, heads, kv_heads, head_dim, half_tables):
            tokens, page = 4, 16
            qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
            q_norm = randn(head_dim, dtype=dtype, seed=1) if normed else None
            k_norm = randn(head_dim, dtype=dtype, seed=2) if normed else None
            cos, sin = tables(50, head_dim)
            positions = torch.tensor([3, 49, 0, 17], device=DEVICE)
            slots = torch.tensor([16, 47, 0, 33], device=DEVICE)
            k_cache = torch.full((3, kv_heads, page, head_dim), 7.0, dtype=dtype, device=DEVICE)
            v_cache = torch.full_like(k_cache, 9.0)
            columns = head_dim // 2 if half_tables else head_dim
            q = rope_and_store(
                qkv, cos[:, :columns], sin[:, :columns], positions, slots, k_cache, v_cache, heads, q_norm, k_norm, EPS
            )

            parts = qkv.view(tokens, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
            tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype == HALF else {"rtol": 1e-5, "atol": 1e-5}
            expected_q = rotate(head_norm(parts[0], q_norm), cos[positions], sin[positions])
            expected_k = rotate(head_norm(parts[1], k_norm), cos[positions], sin[positions])
            torch.testing.assert_close(q, expected_q, **tolerance)
            for token, slot in enumerate(slots.tolist()):
                torch.testing.assert_close(k_cache[slot // page, :, slot % page], expected_k[token], **tolerance)
                assert torch.equal(v_cache[slot // page, :, slot % page], parts[2][token])
            assert (k_cache == 7.0).all(dim=-1).sum() == kv_heads * (3 * page - tokens), "other slots were touched"
            assert (v_cache == 9.0).all(dim=-1).sum() == kv_heads * (3 * page - tokens), "other slots were touched"
