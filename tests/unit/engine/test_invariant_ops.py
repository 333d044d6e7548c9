"""Products of deterministic mode on a GPU, in the interpreter: tiles that depend on the rows change no result."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn

from headwater.engine.kernels import linear
from headwater.engine.runners.cuda import InvariantCudaOps
from headwater.engine.runners.decoder import Projection


def test_a_product_is_added_and_normed_alike_with_and_without_slices(monkeypatch):
    monkeypatch.setattr(linear, "_LONG_SUM", 256)
    for dtype, residual_dtype, has_bias in ((torch.float32, torch.float32, True), (HALF, torch.float32, False)):
        with case(dtype, residual_dtype, has_bias):
            x, weight = randn(5, 256, dtype=dtype), randn(40, 256, dtype=dtype, seed=1)
            bias = randn(40, dtype=dtype, seed=2) if has_bias else None
            norm_weight, seen = randn(40, dtype=dtype, seed=3), []
            for scaled in (False, True):
                monkeypatch.setattr(linear, "SCALED_TILES", scaled)
                residual = randn(5, 40, dtype=residual_dtype, seed=4)
                projection = Projection(weight, bias)
                normed = InvariantCudaOps().linear_add_rms_norm(x, projection, residual, norm_weight, 1e-6)
                seen.append((residual, normed))
            (residual, normed), (other_residual, other_normed) = seen
            torch.testing.assert_close(residual, other_residual, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(normed, other_normed, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
