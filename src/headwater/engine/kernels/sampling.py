"""Sampling on the device in two launches, with the same counter-based uniform numbers as ``headwater.engine.sampler``.

The first launch reads all logits once and writes a maximum and a sum of exponentials per chunk of the vocabulary. The
second finds the chunk in which the cumulative probability crosses the uniform number, and reads only that chunk again.
Every row is computed in a fixed order, so a row's token does not depend on the batch. ``truncation`` has top-k, top-p
and min-p.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


@triton.jit
def inverse_temperature(temperature, row):
    value = tl.load(temperature + row)
    return value, 1.0 / tl.where(value == 0, 1.0, value)


@triton.jit
def _summarise_chunks(
    logits, temperature, chunk_max, chunk_sum, vocabulary, row_stride, num_chunks, CHUNK: tl.constexpr
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    _, factor = inverse_temperature(temperature, row)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    address = logits + row.to(tl.int64) * row_stride + tokens
    scaled = tl.load(address, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32) * factor
    highest = tl.max(scaled, axis=0)
    # The maximum of a chunk without any allowed token is -inf. Subtracting it would turn zeros into NaN.
    weights = tl.exp(scaled - tl.where(highest == float("-inf"), 0.0, highest))
    tl.store(chunk_max + row * num_chunks + chunk, highest)
    tl.store(chunk_sum + row * num_chunks + chunk, tl.sum(weights, axis=0))


@triton.jit
def uniform_number(key, position):
    state = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def first_above(cumulative, target, weights, indices, NONE: tl.constexpr):
    """The first index with a positive weight whose cumulative sum exceeds the target.

    If rounding leaves none, the last index with a positive weight. The weight is checked because a parallel sum is not
    monotonic to the last bit.
    """
    first = tl.min(tl.where((cumulative > target) & (weights > 0), indices, NONE), axis=0)
    last = tl.max(tl.where(weights > 0, indices, 0), axis=0)
    return tl.where(first < NONE, first, last)


@triton.jit
def _draw(
    logits,
    keys,
    positions,
    temperature,
    chunk_max,
    chunk_sum,
    out_tokens,
    out_logprobs,
    vocabulary,
    row_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    value, factor = inverse_temperature(temperature, row)
    greedy = value == 0
    uniform = uniform_number(tl.load(keys + row), tl.load(positions + row))

    chunks = tl.arange(0, CHUNKS_PAD)
    inside = chunks < num_chunks
    maxima = tl.load(chunk_max + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    sums = tl.load(chunk_sum + row * num_chunks + chunks, mask=inside, other=0.0)
    highest = tl.max(maxima, axis=0)
    safe_highest = tl.where(highest == float("-inf"), 0.0, highest)
    chunk_weights = sums.to(tl.float64) * tl.exp((maxima - safe_highest).to(tl.float64))
    chunk_cumulative = tl.cumsum(chunk_weights, axis=0)
    total = tl.sum(chunk_weights, axis=0)
    target = uniform * total

    drawn_chunk = first_above(chunk_cumulative, target, chunk_weights, chunks, CHUNKS_PAD)
    best_chunk = tl.min(tl.where(maxima == highest, chunks, CHUNKS_PAD), axis=0)
    chunk = tl.where(greedy, best_chunk, drawn_chunk)
    chunk = tl.minimum(chunk, num_chunks - 1)
    chosen = chunks == chunk
    local_max = tl.max(tl.where(chosen, maxima, float("-inf")), axis=0)
    safe_max = tl.where(local_max == float("-inf"), 0.0, local_max)
    before = tl.sum(tl.where(chunks < chunk, chunk_weights, 0.0), axis=0)

    steps = tl.arange(0, CHUNK)
    tokens = chunk * CHUNK + steps
    row_logits = logits + row.to(tl.int64) * row_stride
    scaled = tl.load(row_logits + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32) * factor
    # Inside the chunk, weights are relative to its own maximum, so that they do not underflow in an unlikely chunk.
    weights = tl.exp(scaled - safe_max)
    local_target = (target - before) * tl.exp((safe_highest - safe_max).to(tl.float64))
    cumulative = tl.cumsum(weights.to(tl.float64), axis=0)
    drawn = first_above(cumulative, local_target, weights, steps, CHUNK)
    best = tl.min(tl.where(scaled == local_max, steps, CHUNK), axis=0)
    step = tl.where(greedy, best, drawn)
    token = tl.minimum(chunk * CHUNK + step, vocabulary - 1)

    logit = tl.max(tl.where(tokens == token, scaled, float("-inf")), axis=0)
    tl.store(out_tokens + row, token.to(tl.int64))
    tl.store(out_logprobs + row, (logit - safe_highest) - tl.log(total.to(tl.float32)))


def summarise(logits: Tensor, temperature: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Per row and chunk, the maximum of the scaled logits and the sum of their exponentials relative to it."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "the vocabulary must be the contiguous dimension of logits"
    num_chunks = triton.cdiv(vocabulary, chunk)
    chunk_max = torch.empty((rows, num_chunks), dtype=torch.float32, device=logits.device)
    chunk_sum = torch.empty_like(chunk_max)
    _summarise_chunks[(num_chunks, rows)](
        logits, temperature, chunk_max, chunk_sum, vocabulary, logits.stride(0), num_chunks, CHUNK=chunk, num_warps=4
    )
    return chunk_max, chunk_sum


def draw(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    summary: tuple[Tensor, Tensor],
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """A token of each row from all of its tokens, and its log-prob."""
    rows, vocabulary = logits.shape
    chunk_max, chunk_sum = summary
    num_chunks = chunk_max.shape[1]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _draw[(rows,)](
        logits,
        keys,
        positions,
        temperature,
        chunk_max,
        chunk_sum,
        tokens,
        logprobs,
        vocabulary,
        logits.stride(0),
        num_chunks,
        CHUNK=chunk,
        CHUNKS_PAD=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )
    return tokens, logprobs


def sample_tokens(
    logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Sample one token per row of ``logits`` [rows, vocabulary]. Temperature 0 takes the first most likely token.

    Returns tokens (int64) and log-probs (float32) under the distribution they were sampled from. Greedy rows report
    the log-prob at temperature 1. ``chunk`` is the number of tokens per chunk, a power of two.
    """
    return draw(logits, keys, positions, temperature, summarise(logits, temperature, chunk), chunk)
