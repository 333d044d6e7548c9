"""Products of deterministic mode on a GPU, in the interpreter: tiles that depend on the rows change no result."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, ON_CUDA, randn
from torch.nn import functional as F

from headwater.engine.kernels import linear
from headwater.engine.runners import cuda
from headwater.engine.runners.cuda import CudaOps, InvariantCudaOps
from headwater.engine.runners.decoder import Projection

SCALED_TILES_ON = (torch.cuda.get_device_capability() if ON_CUDA else linear.SCALED_TILES_ON, None)
"""With tiles that depend on the rows, and with those of other GPUs."""


def test_a_product_is_added_and_normed_alike_with_and_without_slices(monkeypatch):
    monkeypatch.setattr(linear, "_LONG_SUM", 256)
    for dtype, residual_dtype, has_bias in ((torch.float32, torch.float32, True), (HALF, torch.float32, False)):
        with case(dtype, residual_dtype, has_bias):
            x, weight = randn(5, 256, dtype=dtype), randn(40, 256, dtype=dtype, seed=1)
            bias = randn(40, dtype=dtype, seed=2) if has_bias else None
            norm_weight, seen = randn(40, dtype=dtype, seed=3), []
            for capability in SCALED_TILES_ON:
                monkeypatch.setattr(linear, "SCALED_TILES_ON", capability)
                residual = randn(5, 40, dtype=residual_dtype, seed=4)
                projection = Projection(weight, bias)
                normed = InvariantCudaOps().linear_add_rms_norm(x, projection, residual, norm_weight, 1e-6)
                seen.append((residual, normed))
            (residual, normed), (other_residual, other_normed) = seen
            torch.testing.assert_close(residual, other_residual, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(normed, other_normed, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


def test_gate_and_up_are_computed_alike_in_one_kernel_and_in_two(monkeypatch):
    kernel, calls = cuda.gated_linear, []

    def counted(*operands):
        calls.append(operands)
        return kernel(*operands)

    monkeypatch.setattr(cuda, "gated_linear", counted)
    for dtype, has_bias, in_one in ((HALF, True, True), (HALF, False, True), (torch.float32, False, False)):
        with case(dtype, has_bias):
            x, weight = randn(5, 64, dtype=dtype), randn(48, 64, dtype=dtype, seed=1)
            bias = randn(48, dtype=dtype, seed=2) if has_bias else None
            gate, up = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).chunk(2, dim=-1)
            expected = (F.silu(gate) * up).to(dtype)
            for capability, num_calls in zip(SCALED_TILES_ON, (int(in_one), 0), strict=True):
                calls.clear()
                monkeypatch.setattr(linear, "SCALED_TILES_ON", capability)
                tolerance = 16 * torch.finfo(dtype).eps
                actual = InvariantCudaOps().gated_linear(x, weight, bias)
                torch.testing.assert_close(actual, expected, rtol=tolerance, atol=16 * tolerance)
                assert len(calls) == num_calls
            monkeypatch.setattr(linear, "SCALED_TILES_ON", SCALED_TILES_ON[0])
            calls.clear()
            CudaOps().gated_linear(x, weight, bias)
            assert not calls, "the fast mode uses cuBLAS"
