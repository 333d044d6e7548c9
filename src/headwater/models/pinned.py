"""Page-locked main memory, which a GPU copies to and from at full speed and in the background."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_MAX_BLOCK = 1 << 32


def page_locked(num_bytes: int) -> Tensor:
    """Bytes in page-locked memory."""
    _allocate_with_threads()
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@cache
def _allocate_with_threads() -> None:
    """Make torch allocate page-locked memory with several threads. The driver alone takes 0.66 s per GiB."""
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "pinned_" in chosen:
        return  # the user's choice
    ours = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    torch._C._accelerator_setAllocatorSettings(f"{chosen},{ours}" if chosen else ours)


class PinnedMemory:
    """Tensors in page-locked blocks.

    torch rounds every pinned tensor up to a power of two, which can waste half of the memory. This class allocates
    blocks of a power of two and places tensors inside them.
    """

    def __init__(
        self, num_bytes: int, *, max_block: int = _MAX_BLOCK, allocate: Callable[[int], Tensor] = page_locked
    ) -> None:
        """``num_bytes`` is the expected total. More blocks are allocated on demand.

        While a block is allocated, other threads may wait for the driver. A small ``max_block`` limits that time; only
        tensors that are larger than it get a larger block.
        """
        self._block = min(max_block, _power_of_two(max(1 << 16, num_bytes)))
        self._allocate = allocate
        self._free: list[Tensor] = []
        self.num_blocks = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64  # every tensor starts on a cache line
        for place, rest in enumerate(self._free):
            if len(rest) >= size:
                self._free[place] = rest[size:]
                break
        else:
            rest = self._allocate(max(_power_of_two(size), self._block))
            self.num_blocks += 1
            self._free.append(rest[size:])
        return rest[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _power_of_two(num_bytes: int) -> int:
    """The smallest one that is not less than ``num_bytes``."""
    return 1 << max(0, num_bytes - 1).bit_length()
