"""Page-locked main memory, which a GPU copies to and from at full speed and in the background."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_BLOCK = 1 << 32


class PinnedMemory:
    """Tensors in page-locked blocks.

    torch rounds every pinned tensor up to a power of two, which can waste half of the memory. This class allocates
    blocks of a power of two and places tensors inside them.
    """

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes`` is the expected total. More blocks are allocated on demand."""
        self._block = min(_MAX_BLOCK, 1 << max(16, (num_bytes - 1).bit_length()))
        self._free: list[Tensor] = []

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64  # every tensor starts on a cache line
        for place, rest in enumerate(self._free):
            if len(rest) >= size:
                self._free[place] = rest[size:]
                break
        else:
            rest = torch.empty(max(size, self._block), dtype=torch.uint8, pin_memory=True)
            self._free.append(rest[size:])
        return rest[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
