"""Attention of one new token per row over the paged cache. This kernel reads most of the bytes of a decode step.

One program handles all query heads that share a kv head, so each key and value is read once. The kernel is limited by
memory bandwidth. Its settings maximise bytes in flight: several programs per multiprocessor with several loads each.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.engine.kernels.paging import check_caches, load_page_ids, tile_offsets, tiles_per_run

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16


@dataclass(frozen=True)
class DecodeConfig:
    """Tile size and schedule of a decode program."""

    block_n: int
    """Keys per tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight at once, including the one in use."""


def default_config(head_dim: int, element_bytes: int) -> DecodeConfig:
    """Tiles with about 16 KB of keys and values, so that four programs fit on a multiprocessor."""
    if head_dim * element_bytes <= 128:
        return DecodeConfig(block_n=64, num_warps=4, num_stages=4)
    if head_dim * element_bytes <= 256:
        return DecodeConfig(block_n=32, num_warps=4, num_stages=4)
    return DecodeConfig(block_n=16, num_warps=4, num_stages=3)


def suggest_num_splits(rows: int, num_kv_heads: int, max_context: int, num_processors: int = 132) -> int:
    """Enough splits for about three programs per multiprocessor, but none shorter than 64 keys."""
    wanted = triton.cdiv(3 * num_processors, rows * num_kv_heads)
    return int(max(1, min(wanted, max_context // 64, 16)))


@triton.jit
def _decode(
    q,
    k_cache,
    v_cache,
    page_table,
    context_lens,
    out,
    lse,
    score_scale,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + row)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    first_tile = first // BLOCK_N
    end_tile = (context + BLOCK_N - 1) // BLOCK_N
    if NUM_SPLITS > 1:
        # Only the row's own tiles are divided, so a row's result does not depend on the lengths of other rows.
        per_split = (end_tile - first_tile + NUM_SPLITS - 1) // NUM_SPLITS
        first_tile += split * per_split
        end_tile = tl.minimum(end_tile, first_tile + per_split)

    dims = tl.arange(0, DIM_PAD)
    heads = tl.arange(0, GROUP_PAD)
    steps = tl.arange(0, BLOCK_N)
    query_mask = heads[:, None] < GROUP
    if DIM_PAD != HEAD_DIM:
        query_mask = query_mask & (dims[None, :] < HEAD_DIM)
    query_rows = row * NUM_HEADS + kv_head * GROUP + heads
    query = tl.load(q + query_rows[:, None] * HEAD_DIM + dims[None, :], mask=query_mask, other=0.0)

    table_row = page_table + row.to(tl.int64) * table_stride
    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    running_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    running_sum = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for run in range(first_tile, end_tile, RUN):
        run_start = run * BLOCK_N
        page_ids = load_page_ids(table_row, run_start, context, PAGE)
        for tile in tl.range(run, tl.minimum(run + RUN, end_tile), num_stages=STAGES):
            first_key = tile * BLOCK_N
            offsets = tile_offsets(
                page_ids, run_start, first_key, table_row, context, page_stride, token_stride, PAGE, BLOCK_N
            )
            tile_mask = (steps < context - first_key)[:, None]
            if DIM_PAD != HEAD_DIM:
                tile_mask = tile_mask & (dims[None, :] < HEAD_DIM)
            key = tl.load(k_head + offsets[:, None] + dims[None, :], mask=tile_mask, other=0.0)
            value = tl.load(v_head + offsets[:, None] + dims[None, :], mask=tile_mask, other=0.0)

            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
            visible = first_key + steps < context
            if WINDOW > 0:
                visible = visible & (first_key + steps >= first)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, axis=1))
            rescale = tl.exp2(running_max - new_max)
            weights = tl.exp2(scores - new_max[:, None])
            running_sum = running_sum * rescale + tl.sum(weights, axis=1)
            total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision=PRECISION)
            running_max = new_max

    # A row or split without keys has a sum of zero. Its result is zero, with a weight of zero.
    result = total / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    if NUM_SPLITS > 1:
        partial_rows = (row * NUM_SPLITS + split) * NUM_HEADS + kv_head * GROUP + heads
        tl.store(out + partial_rows[:, None] * HEAD_DIM + dims[None, :], result, mask=query_mask)
        row_lse = tl.where(running_sum > 0, running_max + tl.log2(running_sum), float("-inf"))
        tl.store(lse + partial_rows, row_lse, mask=heads < GROUP)
    else:
        tl.store(out + query_rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=query_mask)


@triton.jit
def _combine_splits(
    partial,
    lse,
    out,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, DIM_PAD)
    rows = (row * NUM_SPLITS + splits) * NUM_HEADS + head
    split_lse = tl.load(lse + rows, mask=splits < NUM_SPLITS, other=float("-inf"))
    mask = (splits[:, None] < NUM_SPLITS) & (dims[None, :] < HEAD_DIM)
    parts = tl.load(partial + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    highest = tl.max(split_lse, axis=0)
    weights = tl.exp2(split_lse - tl.where(highest == float("-inf"), 0.0, highest))
    total_weight = tl.sum(weights, axis=0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(total_weight > 0, total_weight, 1.0)
    address = out + (row * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(address, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    num_splits: int,
    window: int = 0,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attend from ``q`` [rows, heads, head_dim] to the first ``context_lens[row]`` tokens of each row's pages.

    With ``window`` > 0, only the last ``window`` of them are visible. A row without context returns zeros.

    A second kernel combines the results of splits.
    """
    check_caches(q, k_cache, v_cache, page_table)
    rows, num_heads, head_dim = q.shape
    kv_heads, page_tokens = k_cache.shape[1], k_cache.shape[2]
    config = config or default_config(head_dim, q.element_size())
    group = num_heads // kv_heads
    out = torch.empty_like(q)
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty((rows, num_splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, num_splits, num_heads), dtype=torch.float32, device=q.device)
    _decode[(kv_heads, rows, num_splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        context_lens,
        partial,
        lse,
        scale * _LOG2_E,
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_HEADS=num_heads,
        GROUP=group,
        GROUP_PAD=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_tokens,
        BLOCK_N=config.block_n,
        RUN=tiles_per_run(page_tokens, config.block_n),
        NUM_SPLITS=num_splits,
        WINDOW=window,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    if num_splits > 1:
        _combine_splits[(num_heads, rows)](
            partial,
            lse,
            out,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            DIM_PAD=triton.next_power_of_2(head_dim),
            NUM_SPLITS=num_splits,
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            num_warps=1,
        )
    return out
