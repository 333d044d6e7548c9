"""Attention of one new token per row over its paged cache: the kernel that reads most of a decode step's bytes.

One program serves all query heads that share a kv head, so each key and value is read once. It is bound by memory, so
its settings aim at bytes in flight: several programs per multiprocessor, each with a few tiles under way.

Programs that run at the same time serve neighbouring rows, so rows of one group, whose prompt pages are the same, find
each other's in the second-level cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.engine.kernels.dependent_launch import launch_options, let_successor_start, wait_for_predecessor
from headwater.engine.kernels.paging import check_caches, load_page_ids, softcap_scores, tile_offsets, tiles_per_run
from headwater.engine.kernels.prefetch import Soon, prefetch_share, share_of
from headwater.engine.kernels.rope import load_rotated

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16


@dataclass(frozen=True)
class DecodeConfig:
    """How a decode program is cut and scheduled."""

    block_n: int
    """Keys per tile."""
    num_warps: int
    num_stages: int
    """Tiles under way at once, the one being used included."""


@dataclass(frozen=True)
class RotaryInputs:
    """What turns the rows of a merged qkv projection into queries, and into keys and values of the cache."""

    cos: Tensor
    """Tables over positions, of ``head_dim`` or ``head_dim / 2`` columns."""
    sin: Tensor
    positions: Tensor
    slots: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


def default_config(head_dim: int, element_bytes: int) -> DecodeConfig:
    """Tiles of about 16 KB of keys and values together, so that four programs share a multiprocessor."""
    if head_dim * element_bytes <= 128:
        return DecodeConfig(block_n=64, num_warps=4, num_stages=4)
    if head_dim * element_bytes <= 256:
        return DecodeConfig(block_n=32, num_warps=4, num_stages=4)
    return DecodeConfig(block_n=16, num_warps=4, num_stages=3)


def suggest_num_splits(rows: int, num_kv_heads: int, max_context: int, num_processors: int = 132) -> int:
    """Enough splits for about three programs per multiprocessor, none shorter than 64 keys."""
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
    final,
    counters,
    cos,
    sin,
    positions,
    slots,
    q_norm,
    k_norm,
    eps,
    score_scale,
    softcap,
    q_stride,
    cos_stride,
    sin_stride,
    table_stride,
    page_stride,
    head_stride,
    token_stride,
    soon,
    soon_bytes,
    soon_share,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    SOON: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_successor_start(DEPENDENT)
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    dims = tl.arange(0, DIM_PAD)
    heads = tl.arange(0, GROUP_PAD)
    steps = tl.arange(0, BLOCK_N)

    # What follows was written by the step before this one, so it need not wait for the kernel before this one.
    context = tl.load(context_lens + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    cached = context
    if ROTARY:
        # The newest token comes out of the projection; its place in the cache is only written.
        cached = tl.maximum(context - 1, 0)
    first_tile = first // BLOCK_N
    end_tile = tl.where(first < cached, (cached + BLOCK_N - 1) // BLOCK_N, first_tile)
    if NUM_SPLITS > 1:
        # Each row's own tiles are shared out equally, so a row's result does not depend on its neighbours' lengths.
        per_split = (end_tile - first_tile + NUM_SPLITS - 1) // NUM_SPLITS
        first_tile += split * per_split
        end_tile = tl.minimum(end_tile, first_tile + per_split)
    table_row = page_table + row.to(tl.int64) * table_stride
    page_ids = load_page_ids(table_row, first_tile * BLOCK_N, cached, PAGE)
    if ROTARY:
        position = tl.load(positions + row).to(tl.int64)
        slot = tl.load(slots + row)
        # Both halves of a row of the tables are the same; the first is enough.
        angles = dims % (HEAD_DIM // 2)
        cosine = tl.load(cos + position * cos_stride + angles).to(tl.float32)
        sine = tl.load(sin + position * sin_stride + angles).to(tl.float32)
    wait_for_predecessor(DEPENDENT)

    query_mask = heads[:, None] < GROUP
    if DIM_PAD != HEAD_DIM:
        query_mask = query_mask & (dims[None, :] < HEAD_DIM)
    query_source = q + row.to(tl.int64) * q_stride + (kv_head * GROUP + heads[:, None]) * HEAD_DIM
    if ROTARY:
        query = load_rotated(query_source, dims, query_mask, cosine, sine, q_norm, eps, HEAD_DIM, NORM, 0.0)
    else:
        query = tl.load(query_source + dims[None, :], mask=query_mask, other=0.0)
    running_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    running_sum = tl.zeros([GROUP_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    k_head = k_cache + kv_head * head_stride
    v_head = v_cache + kv_head * head_stride
    if ROTARY:
        one = tl.arange(0, 1)[:, None]
        new_mask = (one == 0) & (dims[None, :] < HEAD_DIM)
        key_source = q + row.to(tl.int64) * q_stride + (NUM_HEADS + kv_head + one) * HEAD_DIM
        new_key = load_rotated(key_source, dims, new_mask, cosine, sine, k_norm, eps, HEAD_DIM, NORM, 0.0)
        new_value = tl.load(key_source + NUM_KV_HEADS * HEAD_DIM + dims[None, :], mask=new_mask, other=0.0)
        # One split takes the newest token: it stores it, and starts from it as the one key seen so far.
        takes_new = (context > 0) & (split == 0)
        place = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
        tl.store(k_head + place + one + dims[None, :], new_key, mask=new_mask & takes_new)
        tl.store(v_head + place + one + dims[None, :], new_value, mask=new_mask & takes_new)
        score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1) * score_scale
        if SOFTCAP:
            score = softcap_scores(score, softcap) * 1.4426950408889634
        running_max = tl.where(takes_new, score, float("-inf"))
        running_sum += tl.where(takes_new, 1.0, 0.0)
        total += tl.where(takes_new, new_value.to(tl.float32), 0.0)

    for run in range(first_tile, end_tile, RUN):
        run_start = run * BLOCK_N
        for tile in tl.range(run, tl.minimum(run + RUN, end_tile), num_stages=STAGES):
            first_key = tile * BLOCK_N
            offsets = tile_offsets(
                page_ids, run_start, first_key, table_row, cached, page_stride, token_stride, PAGE, BLOCK_N
            )
            tile_mask = (steps < cached - first_key)[:, None]
            if DIM_PAD != HEAD_DIM:
                tile_mask = tile_mask & (dims[None, :] < HEAD_DIM)
            key = tl.load(k_head + offsets[:, None] + dims[None, :], mask=tile_mask, other=0.0)
            value = tl.load(v_head + offsets[:, None] + dims[None, :], mask=tile_mask, other=0.0)

            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
            if SOFTCAP:
                scores = softcap_scores(scores, softcap) * 1.4426950408889634
            visible = first_key + steps < cached
            if WINDOW > 0:
                visible = visible & (first_key + steps >= first)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, axis=1))
            rescale = tl.exp2(running_max - new_max)
            weights = tl.exp2(scores - new_max[:, None])
            running_sum = running_sum * rescale + tl.sum(weights, axis=1)
            total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision=PRECISION)
            running_max = new_max
        page_ids = load_page_ids(table_row, (run + RUN) * BLOCK_N, cached, PAGE)

    # Only now: while the cache is being read, memory has no time to spare.
    program = (split * tl.num_programs(1) + row) * tl.num_programs(0) + kv_head
    prefetch_share(soon, soon_bytes, soon_share, program, SOON)
    # A row, or a split, without keys has a sum of zero: it yields zeros and a weight of zero.
    result = total / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    query_rows = row * NUM_HEADS + kv_head * GROUP + heads
    if NUM_SPLITS > 1:
        partial_rows = (row * NUM_SPLITS + split) * NUM_HEADS + kv_head * GROUP + heads
        tl.store(out + partial_rows[:, None] * HEAD_DIM + dims[None, :], result, mask=query_mask)
        row_lse = tl.where(running_sum > 0, running_max + tl.log2(running_sum), float("-inf"))
        tl.store(lse + partial_rows, row_lse, mask=heads < GROUP)
        if COMBINE:
            # All of the part must be written before it is counted; whoever counts last combines them, in order.
            tl.debug_barrier()
            counter = counters + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_SPLITS - 1:
                tl.store(counter, 0)
                highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
                total_weight = tl.zeros([GROUP_PAD], tl.float32)
                combined = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
                for part in tl.static_range(NUM_SPLITS):
                    rows = (row * NUM_SPLITS + part) * NUM_HEADS + kv_head * GROUP + heads
                    part_lse = tl.load(lse + rows, mask=heads < GROUP, other=float("-inf"), cache_modifier=".cg")
                    values = tl.load(
                        out + rows[:, None] * HEAD_DIM + dims[None, :], mask=query_mask, other=0.0, cache_modifier=".cg"
                    )
                    new_highest = tl.maximum(highest, part_lse)
                    subtracted = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                    rescale = tl.exp2(highest - subtracted)
                    weight = tl.exp2(part_lse - subtracted)
                    total_weight = total_weight * rescale + weight
                    combined = combined * rescale[:, None] + values * weight[:, None]
                    highest = new_highest
                combined /= tl.where(total_weight > 0, total_weight, 1.0)[:, None]
                address = final + query_rows[:, None] * HEAD_DIM + dims[None, :]
                tl.store(address, combined.to(final.dtype.element_ty), mask=query_mask)
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
    DEPENDENT: tl.constexpr,
):
    let_successor_start(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
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


def split_counters(rows: int, num_kv_heads: int, device: torch.device) -> Tensor:
    """What splits count themselves in: zero between calls; calls that may overlap in time need their own."""
    return torch.zeros((rows, num_kv_heads), dtype=torch.int32, device=device)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    num_splits: int,
    counters: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    config: DecodeConfig | None = None,
    dependent: bool = False,
) -> Tensor:
    """Attend from ``q`` [rows, heads, head_dim] to the first ``context_lens[row]`` tokens of each row's pages.

    With ``window`` > 0 only the last ``window`` of them are seen. A row without context yields zeros. With ``counters``
    the last split of a row combines them all, without them a second launch does. ``dependent`` launches early (see
    ``dependent_launch``): the kernel just before must not be one that writes ``page_table`` or ``context_lens``.
    """
    assert q.is_contiguous(), "q must be contiguous"
    assert k_cache.shape[3] == q.shape[2], f"head_dim is {q.shape[2]} in q and {k_cache.shape[3]} in the cache"
    options = _Options(scale, num_splits, counters, window, softcap, config, dependent, None)
    return _launch(q, q.stride(0), None, k_cache, v_cache, page_table, context_lens, q.shape[1], options)


def rotary_decode_attention(
    qkv: Tensor,
    rotary: RotaryInputs,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    num_heads: int,
    num_splits: int,
    counters: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    config: DecodeConfig | None = None,
    dependent: bool = False,
    soon: Soon | None = None,
) -> Tensor:
    """``rope_and_store`` of ``qkv`` [rows, (heads + 2 kv_heads) * head_dim], then ``paged_decode_attention``, in one.

    ``context_lens`` counts the new tokens; a row without context stores nothing. For ``dependent`` the tensors of
    ``rotary`` are like the page table.
    """
    kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    assert (rotary.q_norm is None) == (rotary.k_norm is None), "q_norm and k_norm are given together"
    assert head_dim % 2 == 0, f"head_dim = {head_dim}: rotary positions need an even number"
    assert qkv.shape[1] == (num_heads + 2 * kv_heads) * head_dim, f"qkv has {qkv.shape[1]} columns"
    assert qkv.stride(1) == 1, "qkv's rows must be contiguous"
    options = _Options(scale, num_splits, counters, window, softcap, config, dependent, soon)
    return _launch(qkv, qkv.stride(0), rotary, k_cache, v_cache, page_table, context_lens, num_heads, options)


@dataclass(frozen=True)
class _Options:
    scale: float
    num_splits: int
    counters: Tensor | None
    window: int
    softcap: float
    config: DecodeConfig | None
    dependent: bool
    soon: Soon | None


def _launch(
    source: Tensor,
    source_stride: int,
    rotary: RotaryInputs | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    num_heads: int,
    options: _Options,
) -> Tensor:
    check_caches(num_heads, k_cache, v_cache, page_table)
    rows, num_splits = source.shape[0], options.num_splits
    kv_heads, page_tokens, head_dim = k_cache.shape[1:]
    group = num_heads // kv_heads
    config = options.config or default_config(head_dim, source.element_size())
    out = torch.empty((rows, num_heads, head_dim), dtype=source.dtype, device=source.device)
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty((rows, num_splits, num_heads, head_dim), dtype=torch.float32, device=source.device)
        lse = torch.empty((rows, num_splits, num_heads), dtype=torch.float32, device=source.device)
    combines = num_splits > 1 and options.counters is not None
    _decode[(kv_heads, rows, num_splits)](
        source,
        k_cache,
        v_cache,
        page_table,
        context_lens,
        partial,
        lse,
        out,
        context_lens if options.counters is None else options.counters,
        source if rotary is None else rotary.cos,
        source if rotary is None else rotary.sin,
        context_lens if rotary is None else rotary.positions,
        context_lens if rotary is None else rotary.slots,
        source if rotary is None or rotary.q_norm is None else rotary.q_norm,
        source if rotary is None or rotary.k_norm is None else rotary.k_norm,
        0.0 if rotary is None else rotary.eps,
        options.scale if options.softcap > 0 else options.scale * _LOG2_E,
        options.softcap,
        source_stride,
        0 if rotary is None else rotary.cos.stride(0),
        0 if rotary is None else rotary.sin.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        source if options.soon is None else options.soon.weight,
        *share_of(options.soon, kv_heads * rows * num_splits),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PAD=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_tokens,
        BLOCK_N=config.block_n,
        RUN=tiles_per_run(page_tokens, config.block_n),
        NUM_SPLITS=num_splits,
        COMBINE=combines,
        WINDOW=options.window,
        SOFTCAP=options.softcap > 0,
        ROTARY=rotary is not None,
        NORM=rotary is not None and rotary.q_norm is not None,
        PRECISION="ieee" if source.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        SOON=options.soon is not None,
        num_warps=config.num_warps,
        **launch_options(options.dependent),
    )
    if num_splits > 1 and not combines:
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
            **launch_options(options.dependent),
        )
    return out
