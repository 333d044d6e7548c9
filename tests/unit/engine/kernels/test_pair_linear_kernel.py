"""Products whose outputs are needed in pairs, with the activation or the rotary embedding in the same kernel."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import DEVICE, HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.pair_linear import PairConfig, can_rotate, gated_linear, rotated_linear
from headwater.engine.kernels.rope import rope_and_store

PAGE = 16


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums, which moves some values to a neighbouring number of their type."""
    tolerance = max(2e-5, 4 * torch.finfo(expected.dtype).eps)
    size = expected.float().abs().max().item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * size)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return wide.float().to(weight.dtype)


def test_gate_and_up():
    for rows, hidden, size, dtype, has_bias in [
        (33, 48, 40, torch.float32, False),
        (70, 72, 100, HALF, True),
    ]:
        with case(rows, hidden, size, dtype, has_bias):
            x, weight = randn(rows, hidden, dtype=dtype), randn(2 * size, hidden, dtype=dtype, seed=2)
            bias = randn(2 * size, dtype=dtype, seed=3) if has_bias else None
            actual = gated_linear(x, weight, bias, PairConfig(64, 32, 32, 4, 3))
            assert actual.shape == (rows, size)
            close(actual, silu_and_mul(linear(x, weight, bias)))


def test_qkv_rotated_and_stored():
    for rows, hidden, heads, kv_heads, head_dim, dtype, has_bias in [
        (17, 32, 2, 1, 32, torch.float32, False),
        (20, 40, 3, 1, 64, HALF, True),
    ]:
        with case(rows, hidden, heads, kv_heads, head_dim, dtype, has_bias):
            x = randn(rows, hidden, dtype=dtype)
            weight = randn((heads + 2 * kv_heads) * head_dim, hidden, dtype=dtype, seed=2)
            bias = randn(len(weight), dtype=dtype, seed=3) if has_bias else None
            angles = torch.rand(50, head_dim // 2, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 6.3
            tables = angles.cos(), angles.sin()
            positions = (torch.arange(rows, device=DEVICE) * 7) % 50
            slots = PAGE + (torch.arange(rows, device=DEVICE) * 5) % (5 * PAGE)
            caches, expected_caches = (
                [torch.full((7, kv_heads, PAGE, head_dim), fill, dtype=dtype, device=DEVICE) for fill in (7.0, 9.0)]
                for _ in range(2)
            )
            config = PairConfig(16, 16, 32, 4, 3)
            actual = rotated_linear(x, weight, bias, tables, positions, slots, tuple(caches), heads, config)
            expected = rope_and_store(linear(x, weight, bias), *tables, positions, slots, *expected_caches, heads)
            assert actual.shape == expected.shape
            close(actual, expected)
            for each, other in zip(caches, expected_caches, strict=True):
                close(each, other)
                assert torch.equal(each == each[0, 0, 0, 0], other == other[0, 0, 0, 0]), "other slots were touched"


def test_a_block_of_pairs_is_within_a_head():
    assert can_rotate(64, PairConfig(64, 32, 64, 4, 3))
    assert not can_rotate(64, PairConfig(64, 64, 64, 4, 3))
    assert not can_rotate(80, PairConfig(64, 16, 64, 4, 3))
