"""Sampling with top-k, top-p and min-p on the device, without sorting and without waiting for the device.

``boundary`` says which tokens are surely kept, and which few are open. ``_settle`` bisects the open tokens by the bits
of their logits, so the boundary is exact; of equal tokens at the boundary, those with the lowest ids are kept. Rows
with more open tokens than there are slots, for example many equal tokens, are bisected in the logits themselves: the
result is the same, but takes longer. ``_draw_kept`` draws from the kept tokens in the order of their ids, with the
uniform number that is used without truncation.

``headwater.engine.sampler`` is the plain version. Both may disagree about a token at the boundary where rounding errors
decide. Every row is computed in a fixed order, so its token does not depend on the batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.engine.kernels.boundary import (
    BY_BOTH,
    BY_COUNT,
    BY_MASS,
    HIGHEST,
    LEAST,
    MANY_WARPS,
    NONE,
    NUM_LIMITS,
    TARGET,
    TINY,
    enclose,
    open_limits,
    scaled_chunk,
)
from headwater.engine.kernels.sampling import CHUNK, draw, first_above, inverse_temperature, summarise, uniform_number

_PIVOTS = 8
_SLOTS = 128
"""Open tokens per chunk that are bisected quickly."""

_LARGEST = tl.constexpr(2**31 - 1)
_SMALLEST = tl.constexpr(-(2**31))
_ALL_TIES = tl.constexpr(2**30)


@triton.jit
def _number(value):
    """An integer per float32, in the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 because -0.0 equals 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weight_of(number, highest):
    bits = number.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.exp(bits.to(tl.float32, bitcast=True) - highest)


@triton.jit
def _open_chunk(source, chunk, CHUNK: tl.constexpr):
    """The numbers and weights of the open tokens of a chunk, read from the logits."""
    _, _, row_logits, factor, highest, least, low, high, vocabulary = source
    scaled, weights = scaled_chunk(row_logits, chunk, factor, highest, least, vocabulary, CHUNK)
    is_open = (scaled >= low) & (scaled < high)
    return tl.where(is_open, _number(scaled), _SMALLEST), weights


@triton.jit
def _beyond(edge, held, source, COUNTS: tl.constexpr, IS_FEW: tl.constexpr, CHUNK: tl.constexpr):
    """What the open tokens with a number above ``edge`` weigh, or how many they are."""
    edge = edge.to(tl.int32)
    if IS_FEW:
        numbers, weights = held
        amount = tl.sum(tl.where(numbers > edge, 1.0 if COUNTS else weights, 0.0)).to(tl.float64)
    else:
        num_open, num_chunks = source[0], source[1]
        amount = tl.full([], 0.0, tl.float64)
        for chunk in range(num_chunks):
            if tl.load(num_open + chunk) > 0:
                numbers, weights = _open_chunk(source, chunk, CHUNK)
                amount += tl.sum(tl.where(numbers > edge, 1.0 if COUNTS else weights, 0.0)).to(tl.float64)
    return amount


@triton.jit
def _settle(
    logits,
    rows,
    temperature,
    top_p,
    min_p,
    kinds,
    limits,
    sure_mass,
    sure_count,
    num_open,
    slots,
    edges,
    kept_mass,
    kept_ties,
    vocabulary,
    row_stride,
    num_chunks,
    IS_FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Find the edge: the number of the least likely token that is kept. Write what each chunk keeps."""
    place = tl.program_id(0)
    kind = tl.load(kinds + place)
    if kind == NONE:
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    first = place * num_chunks
    opened = tl.load(num_open + first + chunks, mask=inside, other=0)
    if (tl.max(opened, axis=0) <= SLOTS) != IS_FEW:
        return
    row = tl.load(rows + place)
    _value, factor = inverse_temperature(temperature, row)
    row_limits = limits + place * NUM_LIMITS
    highest = tl.load(row_limits + HIGHEST).to(tl.float32)
    least = tl.load(row_limits + LEAST).to(tl.float32)
    low, high = open_limits(row_limits, kind)
    row_logits = logits + row * row_stride
    source = (num_open + first, num_chunks, row_logits, factor, highest, least, low, high, vocabulary)
    if IS_FEW:
        slot = tl.arange(0, SLOTS)
        filled = slot[None, :] < opened[:, None]
        address = slots + (first + chunks[:, None]) * SLOTS + slot[None, :]
        values = tl.load(address, mask=filled, other=float("-inf"))
        all_numbers = tl.where(filled, _number(values), _SMALLEST)
        all_weights = tl.exp(values - highest)
        held = (all_numbers, all_weights)
        bottom = tl.min(tl.where(filled, all_numbers, _LARGEST))
        top = tl.max(all_numbers)
    else:
        held = (least, least)
        bottom = tl.full([], _LARGEST, tl.int32)
        top = tl.full([], _SMALLEST, tl.int32)
        for chunk in range(num_chunks):
            if tl.load(num_open + first + chunk) > 0:
                numbers, weights = _open_chunk(source, chunk, CHUNK)
                bottom = tl.minimum(bottom, tl.min(tl.where(numbers == _SMALLEST, _LARGEST, numbers)))
                top = tl.maximum(top, tl.max(numbers))

    # Without open tokens, the edge is above all numbers, and only what is surely kept is kept.
    edge = bottom.to(tl.int64)
    num_ties = tl.full([], _ALL_TIES, tl.float64)
    target = tl.load(row_limits + TARGET)
    if (kind == BY_COUNT) | (kind == BY_BOTH):
        # The largest number that leaves at least k tokens.
        num_sure = tl.sum(tl.load(sure_count + first + chunks, mask=inside, other=0), axis=0).to(tl.float64)
        upper = top.to(tl.int64)
        while edge < upper:
            middle = edge + (upper - edge + 1) // 2
            is_enough = _beyond(middle - 1, held, source, True, IS_FEW, CHUNK) + num_sure >= target
            edge = tl.where(is_enough, middle, edge)
            upper = tl.where(is_enough, upper, middle - 1)
        count = _beyond(edge, held, source, True, IS_FEW, CHUNK)
        num_ties = target - num_sure - count
        if kind == BY_BOTH:
            # All tokens that top-k keeps are open. If there are fewer than k, all of them are kept.
            num_tied = tl.minimum(num_ties, _beyond(edge - 1, held, source, True, IS_FEW, CHUNK) - count)
            kept = _beyond(edge, held, source, False, IS_FEW, CHUNK)
            kept += num_tied * _weight_of(edge, highest).to(tl.float64)
            target = tl.maximum(tl.load(top_p + row).to(tl.float64) * kept, TINY)
    sure = tl.load(sure_mass + first + chunks, mask=inside, other=0.0).to(tl.float64)
    if (kind == BY_MASS) | (kind == BY_BOTH):
        # The smallest number above which less than the target is kept.
        missing = target - tl.sum(sure, axis=0)
        lower = edge
        upper = top.to(tl.int64)
        while lower < upper:
            middle = lower + (upper - lower) // 2
            is_less = _beyond(middle, held, source, False, IS_FEW, CHUNK) < missing
            upper = tl.where(is_less, middle, upper)
            lower = tl.where(is_less, lower, middle + 1)
        mass = _beyond(lower, held, source, False, IS_FEW, CHUNK)
        weight = _weight_of(lower, highest).to(tl.float64)
        # A token is kept if all tokens before it, also those that are equal to it, weigh less than the target.
        room = (missing - mass) / tl.where(weight > 0, weight, 1.0)
        room = tl.where((weight > 0) & (room < _ALL_TIES), room, _ALL_TIES)
        whole = room.to(tl.int64).to(tl.float64)
        room = tl.where(whole < room, whole + 1, whole)
        num_ties = tl.where(lower > edge, room, tl.minimum(room, num_ties))
        edge = lower

    last = edge.to(tl.int32)
    cut = tl.load(min_p + row)
    if IS_FEW:
        beyond = tl.sum(tl.where((all_numbers > last) & (all_weights >= cut), all_weights, 0.0), axis=1).to(tl.float64)
        tied = tl.sum((filled & (all_numbers == last)).to(tl.int32), axis=1)
    else:
        beyond = tl.zeros([CHUNKS_PAD], tl.float64)
        tied = tl.zeros([CHUNKS_PAD], tl.int32)
        for chunk in range(num_chunks):
            if tl.load(num_open + first + chunk) > 0:
                numbers, weights = _open_chunk(source, chunk, CHUNK)
                mass_here = tl.sum(tl.where((numbers > last) & (weights >= cut), weights, 0.0)).to(tl.float64)
                beyond = tl.where(chunks == chunk, mass_here, beyond)
                tied = tl.where(chunks == chunk, tl.sum((numbers == last).to(tl.int32)), tied)
    weight_of_tie = _weight_of(last, highest)
    num_ties = tl.where(weight_of_tie >= cut, tl.minimum(tl.maximum(num_ties, 0.0), _ALL_TIES), 0.0)
    ties = num_ties.to(tl.int32) - (tl.cumsum(tied, axis=0) - tied)
    ties = tl.minimum(tl.maximum(ties, 0), tied)
    beyond += sure + tl.where(ties > 0, ties.to(tl.float64) * weight_of_tie.to(tl.float64), 0.0)
    tl.store(edges + place, last)
    tl.store(kept_mass + first + chunks, beyond, mask=inside)
    tl.store(kept_ties + first + chunks, ties, mask=inside)


@triton.jit
def _draw_kept(
    logits,
    rows,
    keys,
    positions,
    temperature,
    min_p,
    kinds,
    limits,
    edges,
    kept_mass,
    kept_ties,
    out_tokens,
    out_logprobs,
    vocabulary,
    row_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    place = tl.program_id(0)
    kind = tl.load(kinds + place)
    if kind == NONE:
        return
    row = tl.load(rows + place)
    _value, factor = inverse_temperature(temperature, row)
    row_limits = limits + place * NUM_LIMITS
    highest = tl.load(row_limits + HIGHEST).to(tl.float32)
    _low, high = open_limits(row_limits, kind)
    uniform = uniform_number(tl.load(keys + row), tl.load(positions + row))

    chunks = tl.arange(0, CHUNKS_PAD)
    masses = tl.load(kept_mass + place * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    total = tl.sum(masses, axis=0)
    target = uniform * total
    chunk = first_above(tl.cumsum(masses, axis=0), target, masses, chunks, CHUNKS_PAD)
    before = tl.sum(tl.where(chunks < chunk, masses, 0.0), axis=0)

    cut = tl.load(min_p + row)
    scaled, weights = scaled_chunk(logits + row * row_stride, chunk, factor, highest, cut, vocabulary, CHUNK)
    numbers = _number(scaled)
    edge = tl.load(edges + place)
    is_tied = numbers == edge
    rank = tl.cumsum(is_tied.to(tl.int32), axis=0)
    is_kept = (
        (scaled >= high) | (numbers > edge) | (is_tied & (rank <= tl.load(kept_ties + place * num_chunks + chunk)))
    )
    weights = tl.where(is_kept & (scaled > float("-inf")), weights, 0.0)
    steps = tl.arange(0, CHUNK)
    step = first_above(tl.cumsum(weights.to(tl.float64), axis=0), target - before, weights, steps, CHUNK)
    logit = tl.max(tl.where(steps == step, scaled, float("-inf")), axis=0)
    tl.store(out_tokens + row, (chunk * CHUNK + step).to(tl.int64))
    tl.store(out_logprobs + row, (logit - highest) - tl.log(total.to(tl.float32)))


def sample_truncated(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    *,
    chunk: int = CHUNK,
    num_pivots: int = _PIVOTS,
    num_slots: int = _SLOTS,
) -> tuple[Tensor, Tensor]:
    """As ``sampling.sample_tokens``, with truncation of ``rows``.

    ``filters`` are the top-k, top-p and min-p of all rows. A row may occur twice in ``rows``. Rows there that are
    greedy or keep all tokens are sampled as all others.
    """
    summary = summarise(logits, temperature, chunk)
    tokens, logprobs = draw(logits, keys, positions, temperature, summary, chunk)
    if not len(rows):
        return tokens, logprobs
    found = enclose(
        logits, temperature, filters, rows, summary, chunk=chunk, num_pivots=num_pivots, num_slots=num_slots
    )
    num_chunks = summary[0].shape[1]
    edges = torch.empty_like(found.kinds)
    kept_mass, kept_ties = torch.empty_like(found.sure_mass, dtype=torch.float64), torch.empty_like(found.num_open)
    shape = logits.shape[1], logits.stride(0), num_chunks
    pad = triton.next_power_of_2(num_chunks)
    for is_few in (True, False):
        _settle[(len(rows),)](
            logits, rows, temperature, filters[1], filters[2], found.kinds, found.limits, found.sure_mass,
            found.sure_count, found.num_open, found.slots, edges, kept_mass, kept_ties, *shape,
            IS_FEW=is_few, CHUNK=chunk, CHUNKS_PAD=pad, SLOTS=num_slots, **MANY_WARPS,
        )  # fmt: skip
    _draw_kept[(len(rows),)](
        logits, rows, keys, positions, temperature, filters[2], found.kinds, found.limits, edges, kept_mass, kept_ties,
        tokens, logprobs, *shape, CHUNK=chunk, CHUNKS_PAD=pad, **MANY_WARPS,
    )  # fmt: skip
    return tokens, logprobs
