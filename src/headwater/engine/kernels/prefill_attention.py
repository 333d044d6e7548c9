"""Causal attention of chunks of queries over the paged cache, also the engine's batch-invariant attention.

A tile of queries has all heads that share a kv head, so keys and values are read once per kv head. Keys are processed
in order, in blocks of fixed size, and blocks that a query does not see do not change its sums. A query's bits therefore
depend only on the query, its position and its keys: whole prompts, chunks and single tokens agree.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from headwater.engine.kernels.paging import check_caches, load_page_ids, tile_offsets, tiles_per_run

_LOG2_E = 1.4426950408889634
KEYS_PER_BLOCK = 64
"""For heads of up to 128 dimensions. 32 were 28% faster with 64 prompts of 128 tokens and 8% with 16 of 1,024, but
decoding in deterministic mode, which uses the same blocks, is 2% slower with them."""


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes and schedule of a prefill program. Results agree bit for bit only with the same config."""

    block_m: int
    """Rows of a tile: queries times the query heads of one kv head."""
    block_n: int
    """Keys per block."""
    num_warps: int
    num_stages: int


def default_config(head_dim: int, element_bytes: int) -> PrefillConfig:
    """Tiles for Hopper's warp-group multiplication. float32 has no such instruction and needs smaller tiles."""
    if element_bytes == 4:
        return PrefillConfig(block_m=32, block_n=32, num_warps=4, num_stages=2)
    if head_dim <= 128:
        return PrefillConfig(block_m=64, block_n=KEYS_PER_BLOCK, num_warps=4, num_stages=3)
    return PrefillConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)


def queries_per_tile(num_heads: int, num_kv_heads: int, config: PrefillConfig) -> int:
    """The number of queries per tile, for ``build_tiles``."""
    group = num_heads // num_kv_heads
    assert group <= config.block_m, f"{group} query heads per kv head exceed block_m = {config.block_m}"
    return config.block_m // group


def build_tiles(query_lens: Sequence[int] | NDArray[np.integer], queries: int) -> NDArray[np.int32]:
    """The tile map for chunks of these lengths, ``[num_tiles, 2]``: the chunk and the first query of each tile.

    ``build_tiles([5, 2], 4)`` is ``[[0, 0], [0, 4], [1, 0]]``. A map may be padded with ``[-1, 0]``.
    """
    counts = [-(-int(length) // queries) for length in query_lens]
    chunks = np.repeat(np.arange(len(counts)), counts)
    firsts = [np.arange(count) * queries for count in counts]
    return np.stack([chunks, np.concatenate([*firsts, np.empty(0, np.int64)])], axis=1).astype(np.int32)


@triton.jit
def _prefill(
    q,
    k_cache,
    v_cache,
    page_table,
    tiles,
    query_starts,
    context_lens,
    out,
    score_scale,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    chunk = tl.load(tiles + 2 * tile)
    if chunk < 0:
        return
    first_query = tl.load(tiles + 2 * tile + 1)
    chunk_start = tl.load(query_starts + chunk)
    chunk_len = tl.load(query_starts + chunk + 1) - chunk_start
    context = tl.load(context_lens + chunk)

    QUERIES: tl.constexpr = BLOCK_M // GROUP
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM_PAD)
    steps = tl.arange(0, BLOCK_N)
    query_index = first_query + lanes // GROUP
    row_mask = (lanes < QUERIES * GROUP) & (query_index < chunk_len)
    query_mask = row_mask[:, None]
    if DIM_PAD != HEAD_DIM:
        query_mask = query_mask & (dims[None, :] < HEAD_DIM)
    query_rows = (chunk_start + query_index).to(tl.int64) * NUM_HEADS + kv_head * GROUP + lanes % GROUP
    query = tl.load(q + query_rows[:, None] * HEAD_DIM + dims[None, :], mask=query_mask, other=0.0)
    first_position = context - chunk_len + first_query
    query_positions = context - chunk_len + query_index

    end_key = tl.minimum(first_position + QUERIES, context)
    first_block = 0
    if WINDOW > 0:
        first_block = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
    end_block = (end_key + BLOCK_N - 1) // BLOCK_N

    table_row = page_table + chunk.to(tl.int64) * table_stride
    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    for run in range(first_block, end_block, RUN):
        run_start = run * BLOCK_N
        page_ids = load_page_ids(table_row, run_start, end_key, PAGE)
        for block in tl.range(run, tl.minimum(run + RUN, end_block), num_stages=STAGES):
            first_key = block * BLOCK_N
            offsets = tile_offsets(
                page_ids, run_start, first_key, table_row, end_key, page_stride, token_stride, PAGE, BLOCK_N
            )
            tile_mask = (steps < end_key - first_key)[:, None]
            if DIM_PAD != HEAD_DIM:
                tile_mask = tile_mask & (dims[None, :] < HEAD_DIM)
            key = tl.load(k_head + offsets[:, None] + dims[None, :], mask=tile_mask, other=0.0)
            value = tl.load(v_head + offsets[:, None] + dims[None, :], mask=tile_mask, other=0.0)

            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
            keys = first_key + steps
            visible = keys[None, :] <= query_positions[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > query_positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, axis=1))
            subtracted = new_max
            if WINDOW > 0:
                # In blocks before a query's window all scores are -inf. Subtracting -inf would turn zeros into NaN.
                subtracted = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2(running_max - subtracted)
            weights = tl.exp2(scores - subtracted[:, None])
            running_sum = running_sum * rescale + tl.sum(weights, axis=1)
            total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision=PRECISION)
            running_max = new_max

    result = total / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    tl.store(out + query_rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=query_mask)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Attend from ``q`` [tokens, heads, head_dim], packed chunks, to each chunk's pages.

    Chunk ``i`` has the queries ``query_starts[i]:query_starts[i + 1]`` and row ``i`` of ``page_table``.
    ``context_lens[i]`` is the length of its history plus the chunk; all of these keys and values are in the cache.
    ``tiles`` is ``build_tiles(query_lens, queries_per_tile(...))`` with the same config. Tokens outside all tiles are
    not written.
    """
    check_caches(q, k_cache, v_cache, page_table)
    _, num_heads, head_dim = q.shape
    kv_heads, page_tokens = k_cache.shape[1], k_cache.shape[2]
    config = config or default_config(head_dim, q.element_size())
    queries_per_tile(num_heads, kv_heads, config)
    out = torch.empty_like(q)
    _prefill[(kv_heads, tiles.shape[0])](
        q,
        k_cache,
        v_cache,
        page_table,
        tiles,
        query_starts,
        context_lens,
        out,
        scale * _LOG2_E,
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_HEADS=num_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_tokens,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        RUN=tiles_per_run(page_tokens, config.block_n),
        WINDOW=window,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out
