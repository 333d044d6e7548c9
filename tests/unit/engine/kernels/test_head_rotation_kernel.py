"""Rotation of the heads of a vision tower against the formula."""

from __future__ import annotations

import pytest
import torch
from engine.kernels.support import DEVICE, HALF, randn

from headwater.engine.kernels.head_rotation import rotate_heads


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(16, 80), (3, 10)])
def test_queries_and_keys_are_rotated_in_place_and_values_are_not(num_heads, head_dim, dtype):
    num_patches = 5
    qkv = randn(num_patches, 3 * num_heads, head_dim, dtype=dtype)
    angles = 3 * randn(num_patches, head_dim // 2, seed=1)
    low, high = qkv.double().chunk(2, dim=-1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    expected = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    expected[:, 2 * num_heads :] = qkv[:, 2 * num_heads :].double()
    rotate_heads(qkv, angles.cos(), angles.sin(), 2 * num_heads)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(qkv.double(), expected.to(DEVICE), atol=tolerance, rtol=tolerance)


def test_rows_may_be_apart_in_memory():
    memory = randn(4, 6 * 8 + 16)
    qkv, rest = memory[:, : 6 * 8].view(4, 6, 8), memory[:, 6 * 8 :].clone()
    angles = randn(4, 4, seed=1)
    expected = qkv.clone()
    rotate_heads(expected, angles.cos(), angles.sin(), 4)
    rotate_heads(qkv, angles.cos(), angles.sin(), 4)
    assert torch.equal(qkv, expected)
    assert torch.equal(memory[:, 6 * 8 :], rest)
