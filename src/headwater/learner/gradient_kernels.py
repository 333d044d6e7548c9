"""Adds gradients in half precision to float32 sums on CUDA, in one pass over the memory.

torch adds tensors of different types at about a third of the memory's speed, one after the other, because its
multi-tensor kernels need equal types.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_LEAST = 1 << 20
"""Values of a tensor for which the kernel is worth its launch from Python."""


@triton.jit
def _add(total, added, size, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    values = tl.load(total + places, mask=mask) + tl.load(added + places, mask=mask).to(tl.float32)
    tl.store(total + places, values, mask=mask)


def add_large(total: Tensor, added: Tensor) -> bool:
    """``total += added`` with the bits of torch. False, and nothing is done, if torch is the better way."""
    is_dense = total.is_contiguous() and added.is_contiguous()
    if total.numel() < _LEAST or total.dtype != torch.float32 or added.dtype.itemsize != 2 or not is_dense:
        return False
    _add[(triton.cdiv(total.numel(), _BLOCK),)](total, added, total.numel(), BLOCK=_BLOCK, num_warps=8)
    return True
