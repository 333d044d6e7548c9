"""Gate and up with the activation in the same kernel."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.gated_linear import gated_linear
from headwater.engine.kernels.linear import MatmulConfig


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
            actual = gated_linear(x, weight, bias, MatmulConfig(64, 64, 32, 4, 3))
            assert actual.shape == (rows, size)
            close(actual, silu_and_mul(linear(x, weight, bias)))


def test_a_row_has_the_same_bits_whatever_other_rows_there_are():
    x, weight = randn(70, 80, dtype=HALF), randn(96, 80, dtype=HALF, seed=1)
    whole = gated_linear(x, weight)
    for rows in (1, 5, 64):
        assert torch.equal(gated_linear(x[:rows], weight), whole[:rows])
