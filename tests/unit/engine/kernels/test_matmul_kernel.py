"""The matrix product whose rows do not depend on each other."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels.linear import invariant_linear

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, HALF: {"rtol": 2e-2, "atol": 5e-2}}


def test_invariant_linear():
    for tokens in [1, 70]:
        for dtype in [torch.float32, HALF]:
            with case(tokens, dtype):
                x, weight, bias = (
                    randn(tokens, 80, dtype=dtype),
                    randn(70, 80, dtype=dtype, seed=1),
                    randn(70, dtype=dtype, seed=2),
                )
                expected = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
                torch.testing.assert_close(invariant_linear(x, weight, bias), expected, **TOLERANCE[dtype])


def test_a_row_of_the_invariant_product_does_not_depend_on_the_others():
    for dtype in [torch.float32, HALF]:
        with case(dtype):
            x, weight = randn(70, 80, dtype=dtype), randn(48, 80, dtype=dtype, seed=1)
            whole = invariant_linear(x, weight)
            assert torch.equal(whole[:5], invariant_linear(x[:5], weight))
            for row in (0, 33, 69):
                assert torch.equal(whole[row : row + 1], invariant_linear(x[row : row + 1], weight))
