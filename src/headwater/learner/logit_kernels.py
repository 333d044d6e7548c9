"""Statistics of logits and their gradient on CUDA, each in one pass over the logits.

They compute what ``_statistics`` and ``_logits_gradient`` of ``packed_module`` do in plain torch, up to rounding, and
always in the same order, so that their results have the same bits in every run. torch.compile reads the logits twice
for the statistics and takes seconds at the first step.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_GRADIENT_BLOCK = 4096
_WARPS = 8
_LOWEST = tl.constexpr(-1e30)
"""Instead of minus infinity, whose differences would not be numbers."""


@triton.jit
def _summarise(
    logits, targets, logprobs, entropies, squares, normalizers, temperature, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    # Every lane has its own maximum and its own sums, which are joined at the end: one exponential more per logit, but
    # no exchange between threads while the row is read.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * SIZE
    highest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    squared = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, SIZE, BLOCK, num_stages=3):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(start + columns, mask=columns < SIZE, other=_LOWEST).to(tl.float32) / temperature
        higher = tl.maximum(highest, values)
        change = highest - higher
        scale = tl.exp(change)
        shifted = values - higher
        weight = tl.exp(shifted)
        weighted = (weighted + change * total) * scale + shifted * weight
        total = total * scale + weight
        squared = squared * (scale * scale) + weight * weight
        highest = higher
    most = tl.max(highest, axis=0)
    change = highest - most
    scale = tl.exp(change)
    weighted_sum = tl.sum((weighted + change * total) * scale, axis=0)
    total_sum = tl.sum(total * scale, axis=0)
    squared_sum = tl.sum(squared * (scale * scale), axis=0)
    log_total = tl.log(total_sum)
    target = tl.load(start + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, target - most - log_total)
    tl.store(entropies + row, log_total - weighted_sum / total_sum)
    tl.store(squares + row, squared_sum / (total_sum * total_sum))
    tl.store(normalizers + row, most + log_total)


@triton.jit
def _differentiate(
    logits,
    targets,
    normalizers,
    entropies,
    logprob_gradients,
    entropy_gradients,
    result,
    temperature,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    place = row * SIZE + columns
    logprobs = tl.load(logits + place, mask=mask, other=0.0).to(tl.float32) / temperature - tl.load(normalizers + row)
    logprob_gradient = tl.load(logprob_gradients + row)
    upstream = (logprobs + tl.load(entropies + row)) * tl.load(entropy_gradients + row) + logprob_gradient
    is_target = columns == tl.load(targets + row)
    gradient = (tl.where(is_target, logprob_gradient, 0.0) - upstream * tl.exp(logprobs)) / temperature
    tl.store(result + place, gradient.to(result.dtype.element_ty), mask=mask)


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, sum of squared probabilities, and the logarithm of the normaliser."""
    num_rows, size = logits.shape
    results = tuple(torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(4))
    if num_rows:
        _summarise[(num_rows,)](
            logits.contiguous(), targets, *results, float(temperature), SIZE=size, BLOCK=_BLOCK, num_warps=_WARPS
        )
    logprobs, entropies, squares, normalizers = results
    return logprobs, entropies, squares, normalizers


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    logprob_gradient: Tensor,
    entropy_gradient: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits in ``dtype``, the type of the products that follow."""
    num_rows, size = logits.shape
    result = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if num_rows:
        _differentiate[(num_rows, triton.cdiv(size, _GRADIENT_BLOCK))](
            logits.contiguous(),
            targets,
            normalizers,
            entropies,
            # The gradient of a sum is a single number that is expanded.
            logprob_gradient.contiguous(),
            entropy_gradient.contiguous(),
            result,
            float(temperature),
            SIZE=size,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=_WARPS,
        )
    return result
