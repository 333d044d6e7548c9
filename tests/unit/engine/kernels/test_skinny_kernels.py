"""Products with few rows: norm, product and what follows in one kernel."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import DEVICE, HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.norm import rms_norm, sum_add_rms_norm
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.skinny_pairs import (
    NormedRows,
    SkinnyConfig,
    normed_gate_up,
    normed_qkv,
    padded,
    pair_config,
)
from headwater.engine.kernels.skinny_sums import add_product, make_arrived, prepare_norm, sum_config

EPS = 1e-6
PAGE = 16


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums, which moves some values to a neighbouring number of their type."""
    tolerance = max(2e-5, 4 * torch.finfo(expected.dtype).eps)
    size = expected.float().abs().max().item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * size)


def stream(rows: int, hidden: int, dtype: torch.dtype, blocks: int) -> tuple[NormedRows, torch.Tensor]:
    """A residual stream, prepared as a product with ``blocks`` tiles would have, and its norm by the plain kernel."""
    residual, weight = 3.0 * randn(rows, hidden), randn(hidden, dtype=dtype, seed=1)
    prepared = prepare_norm(residual, weight, EPS)
    squares = F.pad(residual.square(), (0, -hidden % blocks, 0, padded(rows) - rows)).unflatten(1, (blocks, -1)).sum(-1)
    torch.testing.assert_close(squares.sum(1), prepared.squares[0])
    return NormedRows(prepared.scaled, squares.T.contiguous(), EPS), rms_norm(residual, weight, EPS)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return wide.float().to(weight.dtype)


def test_gate_and_up():
    for rows, hidden, size, dtype, has_bias, config in [
        (1, 64, 48, torch.float32, False, None),
        (3, 72, 100, HALF, True, None),
        (8, 96, 80, HALF, False, SkinnyConfig(block_n=64, block_k=32, num_warps=4, num_stages=3)),
        (16, 64, 40, torch.float32, True, SkinnyConfig(block_n=32, block_k=32, num_warps=4, num_stages=3)),
        (17, 64, 24, HALF, False, None),
    ]:
        with case(rows, hidden, size, dtype, has_bias, config):
            x, normed = stream(rows, hidden, dtype, blocks=3)
            weight = randn(2 * size, hidden, dtype=dtype, seed=2)
            bias = randn(2 * size, dtype=dtype, seed=3) if has_bias else None
            actual = normed_gate_up(x, weight, bias, config)
            assert actual.shape == (rows, size)
            close(actual, silu_and_mul(linear(normed, weight, bias)))


def test_qkv_rotated_and_stored():
    for rows, hidden, heads, kv_heads, head_dim, dtype, has_bias, rotate in [
        (1, 64, 3, 1, 32, torch.float32, False, True),
        (3, 72, 9, 3, 24, HALF, True, True),
        (8, 96, 4, 2, 64, HALF, True, True),
        (16, 64, 4, 2, 16, torch.float32, True, False),
    ]:
        with case(rows, hidden, heads, kv_heads, head_dim, dtype, has_bias, rotate):
            x, normed = stream(rows, hidden, dtype, blocks=2)
            weight = randn((heads + 2 * kv_heads) * head_dim, hidden, dtype=dtype, seed=2)
            bias = randn(len(weight), dtype=dtype, seed=3) if has_bias else None
            angles = torch.rand(50, head_dim // 2, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 6.3
            tables = angles.cos(), angles.sin()
            positions = (torch.arange(rows, device=DEVICE) * 7) % 50
            slots = PAGE + (torch.arange(rows, device=DEVICE) * 5) % (2 * PAGE)
            caches, expected_caches = (
                [torch.full((3, kv_heads, PAGE, head_dim), fill, dtype=dtype, device=DEVICE) for fill in (7.0, 9.0)]
                for _ in range(2)
            )
            actual = normed_qkv(x, weight, bias, tables, positions, slots, tuple(caches), heads, rotate=rotate)
            product = linear(normed, weight, bias)
            if rotate:
                expected = rope_and_store(product, *tables, positions, slots, *expected_caches, heads)
            else:
                expected = product
            assert actual.shape == expected.shape
            close(actual, expected)
            for each, other in zip(caches, expected_caches, strict=True):
                close(each, other)
                assert torch.equal(each == each[0, 0, 0, 0], other == other[0, 0, 0, 0]), "other slots were touched"


def test_a_product_is_added_and_its_norm_prepared():
    arrived = make_arrived(DEVICE)
    for rows, inputs, outputs, dtype, has_bias, slices in [
        (1, 256, 48, torch.float32, False, 1),
        (3, 200, 40, HALF, True, 3),
        (8, 320, 96, HALF, False, 5),
        (16, 96, 33, torch.float32, True, 8),
        (20, 128, 64, HALF, False, 2),
    ]:
        with case(rows, inputs, outputs, dtype, has_bias, slices):
            x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1)
            bias = randn(outputs, dtype=dtype, seed=2) if has_bias else None
            norm_weight = randn(outputs, dtype=dtype, seed=3)
            residual, expected_residual = randn(rows, outputs, seed=4), randn(rows, outputs, seed=4)
            config = SkinnyConfig(block_n=32, block_k=32, num_warps=4, num_stages=3, slices=slices)
            prepared = add_product(x, weight, bias, residual, norm_weight, EPS, arrived, config)
            product = F.linear(x.float(), weight.float())
            expected = sum_add_rms_norm(product[None], bias, expected_residual, norm_weight, EPS)
            close(residual, expected_residual)
            inverse_rms = torch.rsqrt(prepared.squares.sum(0)[:rows, None] / outputs + EPS)
            close((prepared.scaled * inverse_rms).to(dtype), expected)
            assert not arrived.any(), "the next launch needs counters at zero"


def test_the_sum_has_the_same_bits_for_any_other_rows():
    x, weight, norm_weight = randn(8, 160, dtype=HALF), randn(40, 160, dtype=HALF, seed=1), randn(40, dtype=HALF)
    residual = randn(8, 40, seed=2)
    alone = residual[5:6].clone()
    arrived = make_arrived(DEVICE)
    add_product(x, weight, None, residual, norm_weight, EPS, arrived)
    add_product(x[5:6].clone(), weight, None, alone, norm_weight, EPS, arrived)
    assert torch.equal(alone[0], residual[5])


def test_the_tiles_of_the_shapes_that_are_used():
    assert [pair_config(outputs).block_n for outputs in (17920, 2048, 3072, 960)] == [64, 16, 16, 16]
    assert [sum_config(*shape).slices for shape in ((1536, 8960), (1536, 1536), (576, 1536), (576, 576))] == [
        5,
        3,
        3,
        1,
    ]
