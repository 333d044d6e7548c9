"""Products cut into slices of their inputs."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import HALF, randn
from torch.nn import functional as F

from headwater.engine.kernels.linear import possible_slices, split_linear, suggest_slices


def test_the_parts_add_up_to_the_product():
    for slices in [1, 3]:
        for dtype in [torch.float32, HALF]:
            with case(slices, dtype):
                x, weight = randn(7, 384, dtype=dtype), randn(40, 384, dtype=dtype, seed=1)
                parts = split_linear(x, weight, slices)
                assert parts.shape == (slices, 7, 40)
                assert parts.dtype == torch.float32
                torch.testing.assert_close(
                    parts.sum(0).double(), F.linear(x.double(), weight.double()), rtol=1e-4, atol=1e-3
                )


def test_each_part_is_the_product_of_its_slice():
    x, weight = randn(3, 192), randn(8, 192, seed=1)
    parts = split_linear(x, weight, 3)
    torch.testing.assert_close(parts[1], x[:, 64:128] @ weight[:, 64:128].T, rtol=1e-5, atol=1e-4)


def test_slices_are_equal_and_of_whole_steps():
    assert possible_slices(8960) == [1, 2, 4, 5, 7, 10]
    assert possible_slices(1536) == [1, 2, 3, 4, 6, 8]
    assert possible_slices(100) == []


def test_suggested_slices_are_those_measured_as_best():
    assert [suggest_slices(rows, 1536, 8960) for rows in (8, 128, 256, 512, 1024)] == [5, 5, 4, 2, 1]
    assert [suggest_slices(rows, 1536, 1536) for rows in (8, 256, 512, 1024)] == [2, 2, 1, 1]
    assert suggest_slices(256, 100, 5000) == 1
