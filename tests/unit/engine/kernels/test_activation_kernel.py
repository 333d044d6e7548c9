"""The gated activation."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels.activation import silu_and_mul


def test_gate_comes_first():
    for intermediate in [48, 1500]:
        for dtype in [torch.float32, HALF]:
            with case(intermediate, dtype):
                gate_up = 3 * randn(3, 2 * intermediate, dtype=dtype)
                gate, up = gate_up.chunk(2, dim=-1)
                tolerance = {"rtol": 1.6e-2, "atol": 1e-5} if dtype == HALF else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(silu_and_mul(gate_up), F.silu(gate) * up, **tolerance)


def test_large_gates_do_not_overflow():
    gate_up = randn(1, 4).new_tensor([[-1e4, 1e4, 1.0, 1.0]])
    assert silu_and_mul(gate_up).tolist() == [[0.0, 1e4]]
