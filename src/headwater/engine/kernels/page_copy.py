"""Copies whole pages of the cache, of all layers at once.

The samples of a prompt copy its last, partly filled page. With an index operation of torch this takes hundreds of
launches, because the cache is larger than 32-bit offsets reach, and a temporary copy.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_MAX_PAGES = 65535
"""Limit of the second dimension of a grid."""


@triton.jit
def _copy_pages(storage, sources, targets, part_stride, page_size, BLOCK: tl.constexpr):
    """One block of one part of a page: a part is the keys or the values of a layer."""
    place, part = tl.program_id(1), tl.program_id(2).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < page_size
    pages = storage + part * part_stride
    source = tl.load(sources + place).to(tl.int64) * page_size
    target = tl.load(targets + place).to(tl.int64) * page_size
    tl.store(pages + target + offsets, tl.load(pages + source + offsets, mask=mask), mask=mask)


def copy_pages(storage: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the pages ``sources`` of ``storage`` ``[layers, 2, pages, ...]`` to ``targets``.

    All are copied at the same time, so no target may also be a source.
    """
    assert storage.is_contiguous(), "the cache is one allocation"
    num_parts, page_size = storage.shape[0] * storage.shape[1], storage[0, 0, 0].numel()
    for start in range(0, len(sources), _MAX_PAGES):
        chosen = slice(start, start + _MAX_PAGES)
        grid = (triton.cdiv(page_size, _BLOCK), len(sources[chosen]), num_parts)
        _copy_pages[grid](
            storage, sources[chosen], targets[chosen], storage.stride(1), page_size, BLOCK=_BLOCK, num_warps=8
        )
