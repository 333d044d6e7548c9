"""Sampling with top-k, top-p and min-p on the device, without sorting the vocabulary and without waiting for the device.

Truncation keeps the most likely tokens of a row, and of equal tokens at the boundary those with the lowest ids. The
boundary is found exactly, in launches whose shapes do not depend on values, so a CUDA graph can contain them:

1. ``_open`` computes from the row's maximum and sum (``sampling``) how far below the maximum the boundary can be.
2. Two rounds of ``_measure`` and ``_narrow`` count the tokens (top-k) or add their probabilities (top-p) above 16
   pivots, and continue between the two pivots that enclose the boundary.
3. ``_collect`` adds up what is surely kept and copies the few tokens that are left between the pivots.
4. ``_settle`` bisects these tokens by the bits of their logits. Rows with too many of them, for example many equal
   tokens, are bisected in the logits themselves: the result is the same, but takes longer.
5. ``_draw_kept`` draws from the kept tokens in the order of their ids, with the same uniform number as without
   truncation.

``headwater.engine.sampler`` is the plain version. Every row is computed in a fixed order, so its token does not depend
on the batch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.engine.kernels.sampling import CHUNK, draw, first_above, inverse_temperature, summarise, uniform_number

_PIVOTS = 16
_SLOTS = 128
"""Tokens per chunk that ``_settle`` can hold. Two rounds usually leave about 25 of a flat distribution."""

# What limits a row: nothing, top-k, top-p, both, or only min-p, whose boundary is known from the start.
_NONE = tl.constexpr(0)
_COUNT = tl.constexpr(1)
_MASS = tl.constexpr(2)
_BOTH = tl.constexpr(3)
_FLOOR = tl.constexpr(4)

# Columns of a row's limits. Tokens from HIGH upwards are surely kept, tokens below LOW surely not.
_TARGET = tl.constexpr(0)
_HIGHEST = tl.constexpr(1)
_LOW = tl.constexpr(2)
_HIGH = tl.constexpr(3)
_LEAST = tl.constexpr(4)
_NUM_LIMITS = tl.constexpr(5)

_REACH = tl.constexpr(64.0)
"""How far below the maximum top-k looks first, in logits at temperature 1, if nothing better is known."""
_FARTHER = tl.constexpr(16.0)
_TINY = tl.constexpr(1e-300)
_NO_TOKEN = tl.constexpr(-(2**31))
_ALL_TIES = tl.constexpr(2**30)


@triton.jit
def _limit(limits, place, COLUMN: tl.constexpr):
    return tl.load(limits + place * _NUM_LIMITS + COLUMN)


@triton.jit
def _number(value):
    """An integer per float32, in the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 because -0.0 equals 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _scaled_chunk(row_logits, chunk, factor, highest, vocabulary, CHUNK: tl.constexpr):
    """The scaled logits of a chunk, and their probabilities relative to the most likely token's."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scaled = tl.load(row_logits + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32) * factor
    return scaled, tl.exp(scaled - highest)


@triton.jit
def _is_open(scaled, likelihood, low, high, least):
    """Which tokens may or may not be kept."""
    return (scaled >= low) & (scaled < high) & (scaled > float("-inf")) & (likelihood >= least)


@triton.jit
def _store_pivots(pivots, place, low, high, PIVOTS: tl.constexpr):
    steps = tl.arange(0, PIVOTS)
    tl.store(pivots + place * PIVOTS + steps, low + (high - low) * (steps.to(tl.float32) / PIVOTS))


@triton.jit
def _open(
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    chunk_max,
    chunk_sum,
    kinds,
    limits,
    pivots,
    vocabulary,
    num_chunks,
    CHUNKS_PAD: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(rows + place)
    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    maxima = tl.load(chunk_max + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    sums = tl.load(chunk_sum + row * num_chunks + chunks, mask=inside, other=0.0)
    highest = tl.max(maxima, axis=0)
    total = tl.sum(sums.to(tl.float64) * tl.exp((maxima - highest).to(tl.float64)), axis=0)

    value, factor = inverse_temperature(temperature, row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row).to(tl.float64)
    least = tl.load(min_p + row)
    by_count = (k > 0) & (k < vocabulary)
    by_mass = p < 1
    kind = tl.where(by_mass, _MASS, tl.where(least > 0, _FLOOR, _NONE))
    kind = tl.where(by_count, tl.where(by_mass, _BOTH, _COUNT), kind)
    # A row with NaN, infinity or no token at all keeps what was drawn without truncation, which has the log-prob NaN.
    is_sound = (total > 0) & (total < float("inf")) & (value > 0)
    tl.store(kinds + place, tl.where(is_sound, kind, _NONE))

    # Each token weighs at most 1, relative to the most likely. So all tokens farther than log(vocabulary / rest) below
    # it weigh less than the rest: what top-p may leave out, or what is not needed for k tokens.
    width = _REACH * tl.maximum(factor, 1.0).to(tl.float64)
    rest = tl.where(by_count, total - k.to(tl.float64), (1 - p) * total)
    known = tl.log(vocabulary / tl.maximum(rest, _TINY)) + 0.1
    width = tl.where((by_count | by_mass) & (rest > 0), tl.minimum(width, known), width)
    # top-p is relative to what top-k keeps, so min-p must not remove tokens before both are known.
    least = tl.where(by_count & by_mass, 0.0, least)
    lowest = -tl.log(tl.maximum(least, 1e-30).to(tl.float64)) + 0.01
    width = tl.where(least > 0, tl.minimum(width, lowest), width)
    is_floor = (kind == _FLOOR) & (highest > float("-inf"))
    low = tl.where(is_floor, float("-inf"), highest - width.to(tl.float32))
    target = tl.where(by_count, k.to(tl.float64), tl.maximum(p * total, _TINY))
    first = limits + place * _NUM_LIMITS
    tl.store(first + _TARGET, target)
    tl.store(first + _HIGHEST, highest.to(tl.float64))
    tl.store(first + _LOW, low.to(tl.float64))
    tl.store(first + _HIGH, tl.where(is_floor, float("-inf"), float("inf")).to(tl.float64))
    tl.store(first + _LEAST, least.to(tl.float64))
    _store_pivots(pivots, place, highest - width.to(tl.float32), highest, PIVOTS)


@triton.jit
def _measure(
    logits,
    rows,
    temperature,
    chunk_max,
    kinds,
    limits,
    pivots,
    measured,
    vocabulary,
    row_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    place = tl.program_id(1)
    kind = tl.load(kinds + place)
    if (kind == _NONE) | (kind == _FLOOR):
        return
    row = tl.load(rows + place)
    out = measured + (place * num_chunks + chunk) * PIVOTS
    if tl.load(chunk_max + row * num_chunks + chunk) < tl.load(pivots + place * PIVOTS):
        tl.store(out + tl.arange(0, PIVOTS), tl.zeros([PIVOTS], tl.float32))
        return
    _, factor = inverse_temperature(temperature, row)
    highest = _limit(limits, place, _HIGHEST).to(tl.float32)
    least = _limit(limits, place, _LEAST).to(tl.float32)
    scaled, likelihood = _scaled_chunk(logits + row * row_stride, chunk, factor, highest, vocabulary, CHUNK)
    weights = tl.where(kind == _MASS, likelihood, 1.0)
    weights = tl.where(likelihood >= least, weights, 0.0)
    for each in tl.static_range(PIVOTS):
        pivot = tl.load(pivots + place * PIVOTS + each)
        tl.store(out + each, tl.sum(tl.where(scaled >= pivot, weights, 0.0), axis=0))


@triton.jit
def _narrow(kinds, limits, pivots, measured, num_chunks, CHUNKS_PAD: tl.constexpr, PIVOTS: tl.constexpr):
    place = tl.program_id(0)
    kind = tl.load(kinds + place)
    if (kind == _NONE) | (kind == _FLOOR):
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    steps = tl.arange(0, PIVOTS)
    address = measured + (place * num_chunks + chunks[:, None]) * PIVOTS + steps[None, :]
    table = tl.load(address, mask=chunks[:, None] < num_chunks, other=0.0)
    reached = tl.sum(table.to(tl.float64), axis=0) >= _limit(limits, place, _TARGET)
    bounds = tl.load(pivots + place * PIVOTS + steps)
    # The pivots ascend. The boundary is between the last that reaches the target and the next.
    last = tl.max(tl.where(reached, steps, -1), axis=0)
    low = tl.max(tl.where(steps == last, bounds, float("-inf")), axis=0)
    high = tl.min(tl.where(steps == last + 1, bounds, float("inf")), axis=0)
    high = tl.minimum(high, _limit(limits, place, _HIGH).to(tl.float32))
    tl.store(limits + place * _NUM_LIMITS + _LOW, low.to(tl.float64))
    tl.store(limits + place * _NUM_LIMITS + _HIGH, high.to(tl.float64))
    highest = _limit(limits, place, _HIGHEST).to(tl.float32)
    lowest = tl.min(bounds, axis=0)
    start = tl.where(low == float("-inf"), highest - _FARTHER * (highest - lowest), low)
    tl.debug_barrier()  # all warps must have read the pivots before one of them writes the next
    _store_pivots(pivots, place, start, tl.minimum(high, highest), PIVOTS)


@triton.jit
def _open_limits(limits, place, kind):
    low = _limit(limits, place, _LOW).to(tl.float32)
    high = _limit(limits, place, _HIGH).to(tl.float32)
    # With both top-k and top-p, top-p is applied to all tokens that top-k keeps, so all of them must be collected.
    return low, tl.where(kind == _BOTH, float("inf"), high)


@triton.jit
def _collect(
    logits,
    rows,
    temperature,
    chunk_max,
    kinds,
    limits,
    sure_mass,
    sure_count,
    num_open,
    slots,
    vocabulary,
    row_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    place = tl.program_id(1)
    kind = tl.load(kinds + place)
    if kind == _NONE:
        return
    row = tl.load(rows + place)
    low, high = _open_limits(limits, place, kind)
    out = place * num_chunks + chunk
    if tl.load(chunk_max + row * num_chunks + chunk) < low:
        tl.store(sure_mass + out, 0.0)
        tl.store(sure_count + out, 0)
        tl.store(num_open + out, 0)
        return
    _, factor = inverse_temperature(temperature, row)
    highest = _limit(limits, place, _HIGHEST).to(tl.float32)
    least = _limit(limits, place, _LEAST).to(tl.float32)
    scaled, likelihood = _scaled_chunk(logits + row * row_stride, chunk, factor, highest, vocabulary, CHUNK)
    is_sure = (scaled >= high) & (likelihood >= least)
    is_open = _is_open(scaled, likelihood, low, high, least)
    slot = tl.cumsum(is_open.to(tl.int32), axis=0) - 1
    tl.store(slots + out * SLOTS + slot, scaled, mask=is_open & (slot < SLOTS))
    tl.store(sure_mass + out, tl.sum(tl.where(is_sure, likelihood, 0.0), axis=0))
    tl.store(sure_count + out, tl.sum(is_sure.to(tl.int32), axis=0))
    tl.store(num_open + out, tl.sum(is_open.to(tl.int32), axis=0))


@triton.jit
def _beyond(
    edge,
    numbers,
    likelihoods,
    row_logits,
    num_open,
    factor,
    highest,
    low,
    high,
    least,
    vocabulary,
    num_chunks,
    IS_FEW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many open tokens of the row have a number above ``edge``, and what they weigh."""
    if IS_FEW:
        above = numbers > edge
        count = tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0).to(tl.float64)
        mass = tl.sum(tl.sum(tl.where(above, likelihoods, 0.0), axis=1), axis=0).to(tl.float64)
    else:
        count = tl.full([], 0.0, tl.float64)
        mass = tl.full([], 0.0, tl.float64)
        for chunk in range(num_chunks):
            if tl.load(num_open + chunk) > 0:
                scaled, likelihood = _scaled_chunk(row_logits, chunk, factor, highest, vocabulary, CHUNK)
                above = _is_open(scaled, likelihood, low, high, least) & (_number(scaled) > edge)
                count += tl.sum(above.to(tl.int32), axis=0).to(tl.float64)
                mass += tl.sum(tl.where(above, likelihood, 0.0), axis=0).to(tl.float64)
    return count, mass


@triton.jit
def _likelihood_of(number, highest):
    bits = number.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.exp(bits.to(tl.float32, bitcast=True) - highest)


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
    """Find the number of the least likely token that is kept, and per chunk what is kept."""
    place = tl.program_id(0)
    kind = tl.load(kinds + place)
    if kind == _NONE:
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    first = place * num_chunks
    opened = tl.load(num_open + first + chunks, mask=inside, other=0)
    is_few = tl.max(opened, axis=0) <= SLOTS
    if is_few != IS_FEW:
        return
    row = tl.load(rows + place)
    row_logits = logits + row * row_stride
    temperature_of_row, factor = inverse_temperature(temperature, row)
    highest = _limit(limits, place, _HIGHEST).to(tl.float32)
    least = _limit(limits, place, _LEAST).to(tl.float32)
    low, high = _open_limits(limits, place, kind)
    source = num_open + first

    bottom = tl.full([], 2**31 - 1, tl.int32)
    top = tl.full([], _NO_TOKEN, tl.int32)
    numbers = bottom
    likelihoods = highest
    if IS_FEW:
        slot = tl.arange(0, SLOTS)
        filled = slot[None, :] < opened[:, None]
        address = slots + (first + chunks[:, None]) * SLOTS + slot[None, :]
        values = tl.load(address, mask=filled, other=float("-inf"))
        numbers = tl.where(filled, _number(values), _NO_TOKEN)
        likelihoods = tl.exp(values - highest)
        bottom = tl.min(tl.min(tl.where(filled, numbers, 2**31 - 1), axis=1), axis=0)
        top = tl.max(tl.max(numbers, axis=1), axis=0)
    else:
        for chunk in range(num_chunks):
            if tl.load(source + chunk) > 0:
                scaled, likelihood = _scaled_chunk(row_logits, chunk, factor, highest, vocabulary, CHUNK)
                is_open = _is_open(scaled, likelihood, low, high, least)
                number = _number(scaled)
                bottom = tl.minimum(bottom, tl.min(tl.where(is_open, number, 2**31 - 1), axis=0))
                top = tl.maximum(top, tl.max(tl.where(is_open, number, _NO_TOKEN), axis=0))

    target = _limit(limits, place, _TARGET)
    sure_masses = tl.load(sure_mass + first + chunks, mask=inside, other=0.0).to(tl.float64)
    edge = bottom.to(tl.int64)
    num_ties = tl.full([], _ALL_TIES, tl.float64)
    if (kind == _COUNT) | (kind == _BOTH):
        # The largest number that leaves at least k tokens.
        num_sure = tl.sum(tl.load(sure_count + first + chunks, mask=inside, other=0), axis=0).to(tl.float64)
        upper = top.to(tl.int64)
        while edge < upper:
            middle = edge + (upper - edge + 1) // 2
            count, mass = _beyond(
                (middle - 1).to(tl.int32), numbers, likelihoods, row_logits, source, factor, highest, low, high, least,
                vocabulary, num_chunks, IS_FEW, CHUNK,
            )  # fmt: skip
            is_enough = num_sure + count >= target
            edge = tl.where(is_enough, middle, edge)
            upper = tl.where(is_enough, upper, middle - 1)
        count, mass = _beyond(
            edge.to(tl.int32), numbers, likelihoods, row_logits, source, factor, highest, low, high, least,
            vocabulary, num_chunks, IS_FEW, CHUNK,
        )  # fmt: skip
        num_ties = target - num_sure - count
        if kind == _BOTH:
            # All tokens that top-k keeps are open. If there are fewer than k, all of them are kept.
            all_count, all_mass = _beyond(
                (edge - 1).to(tl.int32), numbers, likelihoods, row_logits, source, factor, highest, low, high, least,
                vocabulary, num_chunks, IS_FEW, CHUNK,
            )  # fmt: skip
            tied = tl.minimum(num_ties, all_count - count) * _likelihood_of(edge, highest).to(tl.float64)
            target = tl.maximum(tl.load(top_p + row).to(tl.float64) * (mass + tied), _TINY)
    if (kind == _MASS) | (kind == _BOTH):
        # The smallest number above which less than the target is kept.
        total_sure = tl.sum(sure_masses, axis=0)
        lower = edge
        upper = top.to(tl.int64)
        while lower < upper:
            middle = lower + (upper - lower) // 2
            count, mass = _beyond(
                middle.to(tl.int32), numbers, likelihoods, row_logits, source, factor, highest, low, high, least,
                vocabulary, num_chunks, IS_FEW, CHUNK,
            )  # fmt: skip
            is_less = total_sure + mass < target
            upper = tl.where(is_less, middle, upper)
            lower = tl.where(is_less, lower, middle + 1)
        count, mass = _beyond(
            lower.to(tl.int32), numbers, likelihoods, row_logits, source, factor, highest, low, high, least,
            vocabulary, num_chunks, IS_FEW, CHUNK,
        )  # fmt: skip
        level = _likelihood_of(lower, highest).to(tl.float64)
        # A token is kept if all tokens before it, also those that are equal to it, weigh less than the target.
        room = (target - total_sure - mass) / tl.where(level > 0, level, 1.0)
        room = tl.where((level > 0) & (room < _ALL_TIES), room, _ALL_TIES)
        whole = room.to(tl.int64).to(tl.float64)
        room = tl.where(whole < room, whole + 1, whole)
        num_ties = tl.where(lower > edge, room, tl.minimum(room, num_ties))
        edge = lower

    cut = tl.load(min_p + row)
    last = edge.to(tl.int32)
    beyond = tl.zeros([CHUNKS_PAD], tl.float64)
    tied = tl.zeros([CHUNKS_PAD], tl.int32)
    if IS_FEW:
        beyond = tl.sum(tl.where((numbers > last) & (likelihoods >= cut), likelihoods, 0.0), axis=1).to(tl.float64)
        tied = tl.sum((filled & (numbers == last)).to(tl.int32), axis=1)
    else:
        for chunk in range(num_chunks):
            if tl.load(source + chunk) > 0:
                scaled, likelihood = _scaled_chunk(row_logits, chunk, factor, highest, vocabulary, CHUNK)
                is_open = _is_open(scaled, likelihood, low, high, least)
                number = _number(scaled)
                kept = is_open & (number > last) & (likelihood >= cut)
                here = chunks == chunk
                beyond = tl.where(here, tl.sum(tl.where(kept, likelihood, 0.0), axis=0).to(tl.float64), beyond)
                tied = tl.where(here, tl.sum((is_open & (number == last)).to(tl.int32), axis=0), tied)
    level = _likelihood_of(last, highest)
    num_ties = tl.where(level >= cut, tl.maximum(num_ties, 0.0), 0.0)
    ties = tl.minimum(num_ties, _ALL_TIES).to(tl.int32)
    ties = tl.minimum(tl.maximum(ties - (tl.cumsum(tied, axis=0) - tied), 0), tied)
    beyond += sure_masses + tl.where(ties > 0, ties.to(tl.float64) * level.to(tl.float64), 0.0)
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
    if kind == _NONE:
        return
    row = tl.load(rows + place)
    temperature_of_row, factor = inverse_temperature(temperature, row)
    highest = _limit(limits, place, _HIGHEST).to(tl.float32)
    low, high = _open_limits(limits, place, kind)
    uniform = uniform_number(tl.load(keys + row), tl.load(positions + row))

    chunks = tl.arange(0, CHUNKS_PAD)
    masses = tl.load(kept_mass + place * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    total = tl.sum(masses, axis=0)
    target = uniform * total
    chunk = first_above(tl.cumsum(masses, axis=0), target, masses, chunks, CHUNKS_PAD)
    before = tl.sum(tl.where(chunks < chunk, masses, 0.0), axis=0)

    scaled, likelihood = _scaled_chunk(logits + row * row_stride, chunk, factor, highest, vocabulary, CHUNK)
    number = _number(scaled)
    edge = tl.load(edges + place)
    is_tied = number == edge
    rank = tl.cumsum(is_tied.to(tl.int32), axis=0)
    is_kept = (scaled >= high) | (number > edge) | (is_tied & (rank <= tl.load(kept_ties + place * num_chunks + chunk)))
    weights = tl.where(is_kept & (likelihood >= tl.load(min_p + row)), likelihood, 0.0)
    steps = tl.arange(0, CHUNK)
    cumulative = tl.cumsum(weights.to(tl.float64), axis=0)
    step = first_above(cumulative, target - before, weights, steps, CHUNK)
    logit = tl.max(tl.where(steps == step, scaled, float("-inf")), axis=0)
    tl.store(out_tokens + row, (chunk * CHUNK + step).to(tl.int64))
    tl.store(out_logprobs + row, (logit - highest) - tl.log(total.to(tl.float32)))


def sample_truncated(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rows: Tensor,
    *,
    chunk: int = CHUNK,
    slots: int = _SLOTS,
) -> tuple[Tensor, Tensor]:
    """As ``sampling.sample_tokens``, with the settings of each row and truncation for those in ``rows``.

    A row may occur twice in ``rows``. Rows there that are greedy or keep all tokens are sampled as all others.
    """
    num_chunks = triton.cdiv(logits.shape[1], chunk)
    places = len(rows)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((places, *shape), dtype=dtype, device=logits.device)

    summary = summarise(logits, temperature, chunk)
    tokens, logprobs = draw(logits, keys, positions, temperature, summary, chunk)
    kinds, limits = empty(dtype=torch.int32), empty(_NUM_LIMITS.value, dtype=torch.float64)
    pivots, measured = empty(_PIVOTS), empty(num_chunks, _PIVOTS)
    sure_mass, sure_count = empty(num_chunks), empty(num_chunks, dtype=torch.int32)
    num_open, opened = empty(num_chunks, dtype=torch.int32), empty(num_chunks, slots)
    edges = empty(dtype=torch.int32)
    kept_mass, kept_ties = empty(num_chunks, dtype=torch.float64), empty(num_chunks, dtype=torch.int32)

    shape = logits.shape[1], logits.stride(0), num_chunks
    pad = triton.next_power_of_2(num_chunks)
    # Without fused multiply-adds, all kernels compute the same bits from a logit.
    few: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    many: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    _open[(places,)](
        rows, temperature, top_k, top_p, min_p, *summary, kinds, limits, pivots, logits.shape[1], num_chunks,
        CHUNKS_PAD=pad, PIVOTS=_PIVOTS, **few,
    )  # fmt: skip
    for _ in range(2):
        _measure[(num_chunks, places)](
            logits, rows, temperature, summary[0], kinds, limits, pivots, measured, *shape,
            CHUNK=chunk, PIVOTS=_PIVOTS, **few,
        )  # fmt: skip
        _narrow[(places,)](
            kinds, limits, pivots, measured, num_chunks, CHUNKS_PAD=pad, PIVOTS=_PIVOTS, **few
        )  # fmt: skip
    _collect[(num_chunks, places)](
        logits, rows, temperature, summary[0], kinds, limits, sure_mass, sure_count, num_open, opened, *shape,
        CHUNK=chunk, SLOTS=slots, **few,
    )  # fmt: skip
    for is_few in (True, False):
        _settle[(places,)](
            logits, rows, temperature, top_p, min_p, kinds, limits, sure_mass, sure_count, num_open, opened, edges,
            kept_mass, kept_ties, *shape, IS_FEW=is_few, CHUNK=chunk, CHUNKS_PAD=pad, SLOTS=slots, **many,
        )  # fmt: skip
    _draw_kept[(places,)](
        logits, rows, keys, positions, temperature, min_p, kinds, limits, edges, kept_mass, kept_ties,
        tokens, logprobs, *shape, CHUNK=chunk, CHUNKS_PAD=pad, **many,
    )  # fmt: skip
    return tokens, logprobs
