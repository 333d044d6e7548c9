"""Advances every row of a decode batch by one token, without the host."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


@triton.jit
def _advance(
    tokens,
    logprobs,
    last_tokens,
    positions,
    context_lens,
    num_generated,
    max_new,
    min_new,
    stop_ids,
    alive,
    slots,
    page_table,
    out_tokens,
    out_logprobs,
    step_index,
    num_rows,
    num_steps,
    table_stride,
    max_pages,
    out_stride,
    PAGE: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.load(step_index)
    for first in range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        inside = rows < num_rows
        active = inside & (tl.load(alive + rows, mask=inside, other=0) != 0)
        token = tl.load(tokens + rows, mask=active, other=-1)
        logprob = tl.load(logprobs + rows, mask=active, other=0.0)
        generated = tl.load(num_generated + rows, mask=active, other=0) + 1
        position = tl.load(positions + rows, mask=active, other=0) + 1
        context = tl.load(context_lens + rows, mask=active, other=0) + 1
        most = tl.load(max_new + rows, mask=active, other=0)
        least = tl.load(min_new + rows, mask=active, other=0)
        stops = tl.arange(0, NUM_STOPS)
        stop = tl.load(stop_ids + rows[:, None] * NUM_STOPS + stops[None, :], mask=active[:, None], other=-1)
        is_stop = tl.max((stop == token[:, None]).to(tl.int32), axis=1) > 0

        # Padding is -1, which is never sampled, so an active row cannot match it.
        finished = (is_stop & (generated > least)) | (generated >= most)
        goes_on = active & (finished == 0)
        page_index = position // PAGE
        has_page = goes_on & (page_index < max_pages)
        page = tl.load(page_table + rows.to(tl.int64) * table_stride + page_index, mask=has_page, other=0)
        slot = tl.where(has_page, page.to(tl.int64) * PAGE + position % PAGE, 0)

        record = rows < tl.where(step < num_steps, num_rows, 0)
        place = step.to(tl.int64) * out_stride + rows
        tl.store(out_tokens + place, token.to(tl.int32), mask=record)
        tl.store(out_logprobs + place, logprob, mask=record)
        tl.store(last_tokens + rows, token, mask=active)
        tl.store(num_generated + rows, generated, mask=active)
        tl.store(positions + rows, position, mask=active)
        # A row that has ended has no context, so attention reads nothing for it.
        tl.store(context_lens + rows, tl.where(goes_on, context, 0), mask=active)
        tl.store(alive + rows, goes_on.to(tl.int8), mask=active)
        tl.store(slots + rows, slot, mask=inside)
    # All warps must have read the old step before one of them writes the new one.
    tl.debug_barrier()
    tl.store(step_index, step + 1)


def advance(
    tokens: Tensor,
    logprobs: Tensor,
    *,
    last_tokens: Tensor,
    positions: Tensor,
    context_lens: Tensor,
    num_generated: Tensor,
    max_new: Tensor,
    min_new: Tensor,
    stop_ids: Tensor,
    alive: Tensor,
    slots: Tensor,
    page_table: Tensor,
    out_tokens: Tensor,
    out_logprobs: Tensor,
    step_index: Tensor,
    page_tokens: int,
) -> None:
    """Record the sampled ``tokens``, end rows that are finished, and set the next cache slot of the others.

    Rows that are not alive record -1 and keep their state; their slot is 0, on the scratch page. ``step_index`` is
    incremented. A step beyond the size of ``out_tokens`` [steps, rows] is not recorded.
    """
    rows = tokens.shape[0]
    num_stops = stop_ids.shape[1]
    assert num_stops & (num_stops - 1) == 0, f"{num_stops} stop ids per row: must be a power of two; pad with -1"
    assert out_tokens.shape == out_logprobs.shape, "out_tokens and out_logprobs must have the same shape"
    assert out_tokens.shape[1] == rows, f"out_tokens has {out_tokens.shape[1]} columns for {rows} rows"
    block = min(_BLOCK, triton.next_power_of_2(rows))
    # One program for all rows, so that no other program reads the step while it changes.
    _advance[(1,)](
        tokens,
        logprobs,
        last_tokens,
        positions,
        context_lens,
        num_generated,
        max_new,
        min_new,
        stop_ids,
        alive.view(torch.int8),
        slots,
        page_table,
        out_tokens,
        out_logprobs,
        step_index,
        rows,
        out_tokens.shape[0],
        page_table.stride(0),
        page_table.shape[1],
        out_tokens.stride(0),
        PAGE=page_tokens,
        NUM_STOPS=num_stops,
        BLOCK=block,
        num_warps=max(1, block // 32),
    )
