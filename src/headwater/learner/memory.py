"""Moving tensors between a device and main memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")

_MAX_BLOCK = 1 << 32


def held_by(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that may be sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


def hold(tensor: Tensor, storage: Tensor) -> None:
    """Let ``tensor``, the same object, hold ``storage`` from now on, wherever that is."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = storage
    else:
        tensor.data = storage


class PinnedMemory:
    """Main memory that a device copies from and to at full speed, in blocks.

    torch rounds every pinned tensor up to a power of two, which for many odd ones is half as much again or more; so
    blocks of a power of two are asked for, and tensors laid out in them.
    """

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes`` are what will be wanted in all; more is found when it is."""
        self._block = min(_MAX_BLOCK, 1 << max(16, (num_bytes - 1).bit_length()))
        self._free: list[Tensor] = []

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64  # so that each starts on a whole cache line
        for place, rest in enumerate(self._free):
            if len(rest) >= size:
                self._free[place] = rest[size:]
                break
        else:
            rest = torch.empty(max(size, self._block), dtype=torch.uint8, pin_memory=True)
            self._free.append(rest[size:])
        return rest[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
