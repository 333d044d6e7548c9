"""Page-locked main memory, which a GPU copies to and from at full speed and in the background."""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

_MAX_BLOCK = 1 << 32
_ALIGNMENT = 64
"""Every tensor starts on a cache line."""


class PinnedMemory:
    """Tensors in page-locked blocks.

    torch rounds every pinned tensor up to a power of two, which can waste half of the memory, and the driver locks one
    page after the other on a single thread. Here the pages are touched by all of torch's threads first, and tensors
    are placed inside large blocks.
    """

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes`` is the expected total. More blocks are allocated on demand."""
        self._expected = num_bytes
        self._free: list[Tensor] = []
        self.num_bytes = 0
        """Allocated so far."""

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        wanted = math.prod(shape) * dtype.itemsize
        size = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        for place, rest in enumerate(self._free):
            if len(rest) >= size:
                self._free[place] = rest[size:]
                break
        else:
            rest = _locked(max(size, min(_MAX_BLOCK, max(1 << 16, self._expected - self.num_bytes))))
            self.num_bytes += len(rest)
            self._free.append(rest[size:])
        return rest[:wanted].view(dtype).view(shape)


def _locked(num_bytes: int) -> Tensor:
    """A block of page-locked memory."""
    if not torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages are locked faster. A child process must not share them: whoever writes to a shared page first gets a
    # new one, and the device would continue to use the old one.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(AttributeError, OSError):  # not every system has them
            pages.madvise(getattr(mmap, advice))
    block = torch.frombuffer(pages, dtype=torch.uint8)
    block.fill_(0)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0)) != 0:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    # The driver must forget the pages before the system gives their addresses to someone else.
    weakref.finalize(pages, cudart.cudaHostUnregister, block.data_ptr()).atexit = False
    return block
