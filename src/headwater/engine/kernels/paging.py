"""Pages of the cache: addressing their keys and values, for both attention kernels, and copying them.

A cache is ``[num_pages, num_kv_heads, page_tokens, head_dim]``, read in tiles of ``BLOCK_N`` tokens. Loading a page id
inside the loop over tiles would use one stage of the compiler's pipeline and leave fewer tiles in flight. So the ids of
a run of pages are kept in registers, one per lane of a warp, and each tile selects its id from them.

The samples of a prompt copy its last, partly filled page, in all layers at once. With an index operation of torch this
takes hundreds of launches, because the cache is larger than 32-bit offsets reach, and a temporary copy.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_RUN = 32
PAGES_PER_RUN = tl.constexpr(_RUN)
_COPY_BLOCK = 4096
_MAX_PAGES = 65535
"""Limit of the second dimension of a grid."""


def tiles_per_run(page_tokens: int, block_n: int) -> int:
    """The number of tiles covered by the ids of one run. The first tile may begin inside a page."""
    return max(1, (_RUN - 1) * page_tokens // block_n)


@triton.jit
def load_page_ids(table_row, first_key, end_key, PAGE: tl.constexpr):
    """The ids of the run of pages that starts at ``first_key``. Pages past ``end_key`` are the scratch page."""
    pages = first_key // PAGE + tl.arange(0, PAGES_PER_RUN)
    return tl.load(table_row + pages, mask=pages * PAGE < end_key, other=0)


@triton.jit
def tile_offsets(
    page_ids,
    run_start,
    first_key,
    table_row,
    end_key,
    page_stride,
    token_stride,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Offsets ``[BLOCK_N]`` of the tile's tokens from the first token of the same head in page 0."""
    steps = tl.arange(0, BLOCK_N)
    if BLOCK_N <= PAGE:
        index = first_key // PAGE - run_start // PAGE
        page = tl.sum(tl.where(tl.arange(0, PAGES_PER_RUN) == index, page_ids, 0), axis=0)
        offsets = page.to(tl.int64) * page_stride + (first_key % PAGE) * token_stride + steps * token_stride
    else:
        # Tiles span several pages only if pages are small, which is not the fast configuration.
        keys = first_key + steps
        pages = tl.load(table_row + keys // PAGE, mask=keys < end_key, other=0)
        offsets = pages.to(tl.int64) * page_stride + (keys % PAGE) * token_stride
    return offsets


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor) -> None:
    """Check the inputs that both attention kernels rely on."""
    head_dim = q.shape[-1]
    assert q.is_contiguous(), "q must be contiguous"
    assert k_cache.shape == v_cache.shape, f"caches differ: {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must have the same strides"
    assert k_cache.stride(3) == 1, "the cache's head_dim must be its innermost, contiguous dimension"
    assert k_cache.shape[3] == head_dim, f"head_dim is {head_dim} in q and {k_cache.shape[3]} in the cache"
    page_tokens, kv_heads = k_cache.shape[2], k_cache.shape[1]
    assert page_tokens & (page_tokens - 1) == 0, f"page_tokens = {page_tokens}: must be a power of two"
    assert q.shape[1] % kv_heads == 0, f"{q.shape[1]} query heads are not a multiple of {kv_heads} kv heads"
    assert page_table.stride(1) == 1, "page_table's rows must be contiguous"


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
        grid = (triton.cdiv(page_size, _COPY_BLOCK), len(sources[chosen]), num_parts)
        _copy_pages[grid](
            storage, sources[chosen], targets[chosen], storage.stride(1), page_size, BLOCK=_COPY_BLOCK, num_warps=8
        )
