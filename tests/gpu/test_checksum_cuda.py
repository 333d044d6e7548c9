"""Tensors that a GPU counts together have the checksum that a CPU computes one by one."""

from __future__ import annotations

import pytest
import torch

from headwater.models.checksum import Checksum, checksum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_checksum_of_a_gpu_is_that_of_a_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (3, 5), (4097,), (7, 31), (), (0, 4), (1000, 2049), (5_000_011,), (40_000_003,)]
    tensors = [(str(shape), torch.randn(shape, generator=generator)) for shape in shapes]
    there = [(name, each.cuda()) for name, each in tensors]
    assert checksum(there, dtype) == checksum(tensors, dtype)
    parts = Checksum(dtype)
    for each in there:
        parts.add([each])
    assert parts.text() == checksum(tensors, dtype)
    there[-1][1][12_345_678] += 1.0
    assert checksum(there, dtype) != checksum(tensors, dtype)
