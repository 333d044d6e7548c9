"""Matrix products."""

from __future__ import annotations

import pytest
import torch
from engine.kernels.support import DEVICE, HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels.matmul import (
    MatmulConfig,
    gate_up_silu,
    invariant_linear,
    split_k_config,
    split_k_counters,
    split_k_linear,
)

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, HALF: {"rtol": 2e-2, "atol": 5e-2}}
CONFIGS = [
    MatmulConfig(16, 64, 32, num_warps=4, num_stages=2, split_k=3),
    MatmulConfig(64, 32, 32, num_warps=4, num_stages=2, split_k=2),
    MatmulConfig(32, 64, 64, num_warps=4, num_stages=2, split_k=1),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tokens", [1, 70])
def test_invariant_linear(dtype, tokens):
    x, weight, bias = randn(tokens, 80, dtype=dtype), randn(70, 80, dtype=dtype, seed=1), randn(70, dtype=dtype, seed=2)
    expected = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    torch.testing.assert_close(invariant_linear(x, weight, bias), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_row_of_the_invariant_product_does_not_depend_on_the_others(dtype):
    x, weight = randn(70, 80, dtype=dtype), randn(48, 80, dtype=dtype, seed=1)
    whole = invariant_linear(x, weight)
    assert torch.equal(whole[:5], invariant_linear(x[:5], weight))
    for row in (0, 33, 69):
        assert torch.equal(whole[row : row + 1], invariant_linear(x[row : row + 1], weight))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("config", [*CONFIGS, None])
@pytest.mark.parametrize("extras", [False, True])
def test_split_k_linear(dtype, config, extras):
    x, weight = randn(20, 272, dtype=dtype), randn(72, 272, dtype=dtype, seed=1)
    bias = randn(72, dtype=dtype, seed=2) if extras else None
    residual = randn(20, 72, dtype=dtype, seed=3) if extras else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if residual is not None:
        expected = expected + residual
    counters = split_k_counters(DEVICE)
    for _ in range(2):
        actual = split_k_linear(x, weight, bias, residual, counters=counters, config=config)
        torch.testing.assert_close(actual, expected.to(dtype), **TOLERANCE[dtype])
        assert not counters.any(), "counters must be zero again for the next call"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("config", [*CONFIGS[:2], None])
def test_gate_up_silu(dtype, config):
    x, weight = randn(20, 48, dtype=dtype), 0.3 * randn(2 * 72, 48, dtype=dtype, seed=1)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    torch.testing.assert_close(
        gate_up_silu(x, weight, config=config), (F.silu(gate) * up).to(dtype), **TOLERANCE[dtype]
    )


def test_parts_of_the_sum_fill_the_device():
    config = split_k_config(tokens=64, outputs=1536, inputs=8960, element_bytes=2)
    assert (config.block_m, config.split_k) == (64, 11)
    assert split_k_config(tokens=256, outputs=17920, inputs=1536, element_bytes=2).split_k == 1
