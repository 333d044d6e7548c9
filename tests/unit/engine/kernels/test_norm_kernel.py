"""RMS norms."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn

from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # One unit in the last place: the device's reciprocal root is not correctly rounded.
    torch.testing.assert_close(actual, expected, rtol=1e-2 if actual.dtype == HALF else 2e-6, atol=1e-6)


def test_rms_norm():
    for hidden in [64, 576]:
        for dtype in [torch.float32, HALF]:
            with case(hidden, dtype):
                x, weight = randn(5, hidden, dtype=dtype), randn(hidden, dtype=dtype, seed=1)
                close(rms_norm(x, weight, 1e-6), reference(x, weight, 1e-6))


def test_add_rms_norm_updates_the_residual_and_norms_the_rounded_sum():
    for dtype in [torch.float32, HALF]:
        with case(dtype):
            x, residual, weight = (
                randn(3, 96, dtype=dtype),
                randn(3, 96, dtype=dtype, seed=1),
                randn(96, dtype=dtype, seed=2),
            )
            total = x + residual
            y = add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(residual, total)
            close(y, reference(total, weight, 1e-5))


def test_rows_may_be_a_slice_of_a_wider_tensor():
    wide, weight = randn(4, 200), randn(64, seed=1)
    close(rms_norm(wide[:, 100:164], weight, 1e-6), reference(wide[:, 100:164], weight, 1e-6))


def test_parts_are_summed_and_rounded_before_they_reach_the_residual():
    for dtype, num_parts, biased in [
        (torch.float32, 1, False),
        (torch.float32, 3, True),
        (HALF, 1, True),
        (HALF, 3, False),
    ]:
        with case(dtype, num_parts, biased):
            parts = randn(num_parts, 5, 96)
            residual, weight = randn(5, 96, dtype=dtype, seed=1), randn(96, dtype=dtype, seed=2)
            bias = randn(96, dtype=dtype, seed=3) if biased else None
            product = parts[0].clone()
            for part in parts[1:]:
                product += part
            if bias is not None:
                product += bias.float()
            total = product.to(dtype) + residual
            y = sum_add_rms_norm(parts, bias, residual, weight, 1e-5)
            assert torch.equal(residual, total)
            assert y.dtype == dtype
            close(y, reference(total, weight, 1e-5))


def test_a_wide_residual_is_not_rounded_and_its_norm_once():
    for num_parts, biased in [(1, False), (3, True)]:
        with case(num_parts, biased):
            parts, residual, weight = randn(num_parts, 5, 96), randn(5, 96, seed=1), randn(96, dtype=HALF, seed=2)
            bias = randn(96, dtype=HALF, seed=3) if biased else None
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            if bias is not None:
                total += bias.float()
            total += residual
            y = sum_add_rms_norm(parts, bias, residual, weight, 1e-5)
            assert torch.equal(residual, total)
            exact = total.double() * torch.rsqrt(total.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
            assert y.dtype == HALF
            # Half a unit in the last place. The interpreter truncates, which is at most a whole one.
            assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-7).all()
            assert torch.equal(rms_norm(total, weight, 1e-5), y)
