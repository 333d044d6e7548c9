"""Where the boundary of a truncated distribution (top-k, top-p, min-p) is, without sorting the vocabulary.

Truncation keeps the most likely tokens of a row. The boundary is enclosed in launches whose shapes do not depend on
values, so a CUDA graph can contain them:

1. ``_open`` computes from the row's maximum and sum (``sampling``) how far below the maximum the boundary can be.
2. ``_measure`` counts the tokens (top-k) or adds their probabilities (top-p) above some pivots, and ``_narrow`` finds
   the two pivots that enclose the boundary. The later of three rounds have their pivots around an interpolated guess.
   Two rounds would leave too many open tokens in a flat distribution.
3. ``_collect`` adds up what is surely kept and copies the few open tokens, which are between the two pivots.

``truncation`` decides about the open tokens and draws.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.engine.kernels.sampling import inverse_temperature

# What limits a row: nothing, top-k, top-p, both, or only min-p, whose boundary is known from the start.
NONE = tl.constexpr(0)
BY_COUNT = tl.constexpr(1)
BY_MASS = tl.constexpr(2)
BY_BOTH = tl.constexpr(3)
BY_FLOOR = tl.constexpr(4)

# Columns of a row's limits. Tokens from HIGH upwards are surely kept and tokens below LOW are surely not. TARGET is the
# number of tokens for top-k and the mass for top-p, where the most likely token weighs 1. Less likely tokens than LEAST
# are removed by min-p.
TARGET = tl.constexpr(0)
HIGHEST = tl.constexpr(1)
LOW = tl.constexpr(2)
HIGH = tl.constexpr(3)
LEAST = tl.constexpr(4)
NUM_LIMITS = tl.constexpr(5)

_REACH = tl.constexpr(64.0)
"""How far below the maximum top-k looks first, in logits at temperature 1, if nothing better is known."""
_FARTHER = tl.constexpr(16.0)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
TINY = tl.constexpr(1e-300)
_NUM_ROUNDS = 3

# Without fused multiply-adds, all kernels compute the same bits from a logit.
FEW_WARPS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
MANY_WARPS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def scaled_chunk(row_logits, chunk, factor, highest, least, vocabulary, CHUNK: tl.constexpr):
    """The scaled logits of a chunk, and what its tokens weigh. What min-p removes becomes minus infinity."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scaled = tl.load(row_logits + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32) * factor
    weights = tl.exp(scaled - highest)
    return tl.where(weights >= least, scaled, float("-inf")), weights


@triton.jit
def open_limits(first, kind):
    """Open tokens are from ``low`` to below ``high``."""
    low = tl.maximum(tl.load(first + LOW).to(tl.float32), _LOWEST)  # not tokens at minus infinity
    # With both top-k and top-p, top-p is applied to all tokens that top-k keeps, so all of them must be collected.
    return low, tl.where(kind == BY_BOTH, float("inf"), tl.load(first + HIGH).to(tl.float32))


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
    has_k = (k > 0) & (k < vocabulary)
    has_p = p < 1
    kind = tl.where(has_p, BY_MASS, tl.where(least > 0, BY_FLOOR, NONE))
    kind = tl.where(has_k, tl.where(has_p, BY_BOTH, BY_COUNT), kind)
    # A row with NaN, infinity or no token at all keeps what was drawn without truncation, which has the log-prob NaN.
    is_sound = (total > 0) & (total < float("inf")) & (value > 0)
    tl.store(kinds + place, tl.where(is_sound, kind, NONE))

    # No token weighs more than 1. So all tokens farther than log(vocabulary / rest) below the maximum weigh less than
    # the rest: what top-p may leave out, or what is not needed for k tokens.
    width = _REACH * tl.maximum(factor, 1.0).to(tl.float64)
    rest = tl.where(has_k, total - k.to(tl.float64), (1 - p) * total)
    known = tl.log(vocabulary / tl.maximum(rest, TINY)) + 0.1
    width = tl.where((has_k | has_p) & (rest > 0), tl.minimum(width, known), width)
    # top-p is relative to what top-k keeps, so min-p must not remove tokens before both are known.
    least = tl.where(has_k & has_p, 0.0, least)
    floor = -tl.log(tl.maximum(least, 1e-30).to(tl.float64)) + 0.01
    width = tl.where(least > 0, tl.minimum(width, floor), width).to(tl.float32)
    first = limits + place * NUM_LIMITS
    tl.store(first + TARGET, tl.where(has_k, k.to(tl.float64), tl.maximum(p * total, TINY)))
    tl.store(first + HIGHEST, highest.to(tl.float64))
    tl.store(first + LOW, tl.full([], float("-inf"), tl.float64))
    tl.store(first + HIGH, tl.where(kind == BY_FLOOR, float("-inf"), float("inf")).to(tl.float64))
    tl.store(first + LEAST, least.to(tl.float64))
    steps = tl.arange(0, PIVOTS)
    tl.store(pivots + place * PIVOTS + steps, highest - width * (1 - steps.to(tl.float32) / PIVOTS))


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
    if (kind == NONE) | (kind == BY_FLOOR):
        return
    row = tl.load(rows + place)
    out = measured + (place * num_chunks + chunk) * PIVOTS
    if tl.load(chunk_max + row * num_chunks + chunk) < tl.load(pivots + place * PIVOTS):
        tl.store(out + tl.arange(0, PIVOTS), tl.zeros([PIVOTS], tl.float32))
        return
    _value, factor = inverse_temperature(temperature, row)
    first = limits + place * NUM_LIMITS
    highest = tl.load(first + HIGHEST).to(tl.float32)
    least = tl.load(first + LEAST).to(tl.float32)
    scaled, weights = scaled_chunk(logits + row * row_stride, chunk, factor, highest, least, vocabulary, CHUNK)
    weights = tl.where(kind == BY_MASS, weights, 1.0)
    for each in tl.static_range(PIVOTS):
        pivot = tl.load(pivots + place * PIVOTS + each)
        tl.store(out + each, tl.sum(tl.where(scaled >= pivot, weights, 0.0), axis=0))


@triton.jit
def _narrow(kinds, limits, pivots, measured, num_chunks, CHUNKS_PAD: tl.constexpr, PIVOTS: tl.constexpr):
    place = tl.program_id(0)
    kind = tl.load(kinds + place)
    if (kind == NONE) | (kind == BY_FLOOR):
        return
    chunks = tl.arange(0, CHUNKS_PAD)
    steps = tl.arange(0, PIVOTS)
    address = measured + (place * num_chunks + chunks[:, None]) * PIVOTS + steps[None, :]
    sums = tl.sum(tl.load(address, mask=chunks[:, None] < num_chunks, other=0.0).to(tl.float64), axis=0)
    bounds = tl.load(pivots + place * PIVOTS + steps)
    first = limits + place * NUM_LIMITS
    target = tl.load(first + TARGET)
    highest = tl.load(first + HIGHEST).to(tl.float32)
    # The pivots ascend. The boundary is between the last that reaches the target and the next.
    last = tl.max(tl.where(sums >= target, steps, -1), axis=0)
    low = tl.max(tl.where(steps == last, bounds, float("-inf")), axis=0)
    low = tl.maximum(low, tl.load(first + LOW).to(tl.float32))
    high = tl.min(tl.where(steps == last + 1, bounds, float("inf")), axis=0)
    high = tl.minimum(high, tl.load(first + HIGH).to(tl.float32))
    tl.store(first + LOW, low.to(tl.float64))
    tl.store(first + HIGH, high.to(tl.float64))

    above_low = tl.max(tl.where(steps == last, sums, 0.0), axis=0)
    above_high = tl.max(tl.where(steps == last + 1, sums, 0.0), axis=0)
    share = tl.minimum(tl.maximum(above_low - target, 0.0) / tl.maximum(above_low - above_high, TINY), 1.0)
    top = tl.minimum(high, highest)
    width = tl.where(low == float("-inf"), 0.0, top - low)
    guess = top - width * (1 - share).to(tl.float32)
    side = steps.to(tl.float32) - (PIVOTS - 1) / 2
    offset = tl.where(side < 0, -1.0, 1.0) * tl.exp2(2 * tl.abs(side) - PIVOTS)  # 1/128, 1/32, 1/8, 1/2 of 8 pivots
    around = tl.minimum(tl.maximum(guess + width * offset, low), top)
    # If even the lowest pivot was too high, look much farther below.
    start = highest - _FARTHER * (highest - tl.min(bounds, axis=0))
    farther = start + (top - start) * (steps.to(tl.float32) / PIVOTS)
    tl.debug_barrier()  # all warps must have read the pivots before one of them writes the next
    tl.store(pivots + place * PIVOTS + steps, tl.where(low == float("-inf"), farther, around))


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
    if kind == NONE:
        return
    row = tl.load(rows + place)
    first = limits + place * NUM_LIMITS
    low, high = open_limits(first, kind)
    out = place * num_chunks + chunk
    if tl.load(chunk_max + row * num_chunks + chunk) < low:
        tl.store(sure_mass + out, 0.0)
        tl.store(sure_count + out, 0)
        tl.store(num_open + out, 0)
        return
    _value, factor = inverse_temperature(temperature, row)
    highest = tl.load(first + HIGHEST).to(tl.float32)
    least = tl.load(first + LEAST).to(tl.float32)
    scaled, weights = scaled_chunk(logits + row * row_stride, chunk, factor, highest, least, vocabulary, CHUNK)
    is_sure = scaled >= tl.maximum(high, _LOWEST)
    is_open = (scaled >= low) & (scaled < high)
    # Groups of four first: a cumulative sum over all tokens would take most of the time.
    flags = tl.reshape(is_open.to(tl.int32), [CHUNK // 4, 4])
    num_in_group = tl.sum(flags, axis=1)
    before_group = tl.cumsum(num_in_group, axis=0) - num_in_group
    slot = tl.reshape(before_group[:, None] + tl.cumsum(flags, axis=1), [CHUNK]) - 1
    tl.store(slots + out * SLOTS + slot, scaled, mask=is_open & (slot < SLOTS))
    tl.store(sure_mass + out, tl.sum(tl.where(is_sure, weights, 0.0), axis=0))
    tl.store(sure_count + out, tl.sum(is_sure.to(tl.int32), axis=0))
    tl.store(num_open + out, tl.sum(num_in_group, axis=0))


@dataclass(frozen=True)
class Boundary:
    """What is known about the boundary of each place, that is, each truncated row."""

    rows: Tensor
    kinds: Tensor
    limits: Tensor
    sure_mass: Tensor
    """What the tokens that are surely kept weigh, ``[places, chunks]``."""
    sure_count: Tensor
    num_open: Tensor
    slots: Tensor
    """The scaled logits of the first open tokens of each chunk, ``[places, chunks, slots]``."""


def enclose(
    logits: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    summary: tuple[Tensor, Tensor],
    *,
    chunk: int,
    num_pivots: int,
    num_slots: int,
) -> Boundary:
    """Enclose the boundaries of ``rows``. ``filters`` are the top-k, top-p and min-p of all rows."""
    vocabulary, num_chunks, places = logits.shape[1], summary[0].shape[1], len(rows)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((places, *shape), dtype=dtype, device=logits.device)

    def integers(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int32)

    kinds, limits = integers(), empty(NUM_LIMITS.value, dtype=torch.float64)
    pivots, measured = empty(num_pivots), empty(num_chunks, num_pivots)
    sure_mass, sure_count, num_open = empty(num_chunks), integers(num_chunks), integers(num_chunks)
    slots = empty(num_chunks, num_slots)
    shape = vocabulary, logits.stride(0), num_chunks
    tiles = {"CHUNKS_PAD": triton.next_power_of_2(num_chunks), "PIVOTS": num_pivots}
    _open[(places,)](
        rows, temperature, *filters, *summary, kinds, limits, pivots, vocabulary, num_chunks, **tiles, **FEW_WARPS
    )
    for _ in range(_NUM_ROUNDS):
        _measure[(num_chunks, places)](
            logits, rows, temperature, summary[0], kinds, limits, pivots, measured, *shape,
            CHUNK=chunk, PIVOTS=num_pivots, **FEW_WARPS,
        )  # fmt: skip
        _narrow[(places,)](kinds, limits, pivots, measured, num_chunks, **tiles, **FEW_WARPS)
    _collect[(num_chunks, places)](
        logits, rows, temperature, summary[0], kinds, limits, sure_mass, sure_count, num_open, slots, *shape,
        CHUNK=chunk, SLOTS=num_slots, **MANY_WARPS,
    )  # fmt: skip
    return Boundary(rows, kinds, limits, sure_mass, sure_count, num_open, slots)
