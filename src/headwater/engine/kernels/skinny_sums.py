"""Products with few rows that are added to the residual stream: the projections after attention and in the MLP.

The sum over inputs is cut into slices so that there are enough programs to read the weight at full speed. The program
that finishes a tile last adds the parts, always in the same order, so results do not depend on which one is last. It
also prepares the norm that follows: it scales the new residual by the norm's weight and sums its squares, from which
``skinny_pairs`` completes the norm.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.kernels.skinny_pairs import (
    NormedRows,
    SkinnyConfig,
    check_weight,
    input_tile,
    launch_options,
    padded,
    precision_of,
    weight_tile,
)

_PROGRAMS = 240
_MIN_STEPS = 4
MAX_TILES = 4096
"""The size of ``arrived``: more result tiles than any product has whose programs are worth splitting."""


def sum_config(outputs: int, inputs: int) -> SkinnyConfig:
    """Narrow tiles, and slices for about two programs per multiprocessor. Not measured yet."""
    block_n, block_k = 32, 128
    tiles, steps = triton.cdiv(outputs, block_n), triton.cdiv(inputs, block_k)
    slices = max(1, min(triton.cdiv(_PROGRAMS, tiles), steps // _MIN_STEPS))
    return SkinnyConfig(block_n=block_n, block_k=block_k, num_warps=4, num_stages=6, slices=slices)


def make_arrived(device: torch.device) -> Tensor:
    """Counters of the programs that have finished. Every launch leaves them at zero for the next one."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _add_product(
    x, weight, bias, residual, norm_weight, scaled, squares, parts, arrived, num_rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(columns, OUTPUTS - 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    start = part * SLICE
    end = tl.minimum(start + SLICE, INPUTS)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        values = weight_tile(weight, outputs, start, INPUTS, BLOCK_K)
        tl.extra.cuda.gdc_wait()  # what follows reads results of the kernel before
        given = input_tile(x, num_rows, start, INPUTS, BLOCK_M, BLOCK_K)
        total = tl.dot(given, values.T, total, input_precision=PRECISION)
        start += BLOCK_K
    for first in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        values = weight_tile(weight, outputs, first, INPUTS, BLOCK_K)
        given = input_tile(x, num_rows, first, INPUTS, BLOCK_M, BLOCK_K)
        total = tl.dot(given, values.T, total, input_precision=PRECISION)

    is_last = True
    if SLICES > 1:
        within = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = parts + tile * (SLICES * BLOCK_M * BLOCK_N) + within
        tl.store(own + part * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()  # all threads have written before one of them says so
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SLICES - 1
        if is_last:
            tl.store(arrived + tile, 0)
            # Past the first-level cache, which may not have what other multiprocessors wrote.
            total = tl.load(own, cache_modifier=".cg")
            for other in tl.static_range(1, SLICES):
                total += tl.load(own + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + outputs).to(tl.float32)[None, :]
        mask = (rows < num_rows)[:, None] & (columns < OUTPUTS)[None, :]
        place = rows[:, None] * OUTPUTS + columns[None, :]
        total = tl.where(mask, total + tl.load(residual + place, mask=mask, other=0.0), 0.0)
        tl.store(residual + place, total, mask=mask)
        scale = tl.load(norm_weight + outputs).to(tl.float32)
        tl.store(scaled + place, total * scale[None, :], mask=mask)
        tl.store(squares + tile * BLOCK_M + rows, tl.sum(total * total, axis=1))


def add_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    arrived: Tensor,
    config: SkinnyConfig | None = None,
) -> NormedRows:
    """Add ``x @ weight.T + bias`` to the float32 ``residual`` in place, and prepare the norm of the sum.

    ``arrived`` comes from ``make_arrived``. Launches that share it must not overlap.
    """
    rows, inputs = x.shape
    outputs, block_m = len(weight), padded(rows)
    config = config or sum_config(outputs, inputs)
    check_weight(weight, inputs)
    assert x.is_contiguous(), "x must be contiguous"
    assert residual.dtype == torch.float32, f"residual is {residual.dtype}: these kernels add in float32"
    assert residual.is_contiguous(), "residual must be contiguous"
    steps = triton.cdiv(inputs, config.block_k)
    per_slice = triton.cdiv(steps, config.slices)
    slices = triton.cdiv(steps, per_slice)  # none is empty
    tiles = triton.cdiv(outputs, config.block_n)
    assert tiles <= len(arrived), f"{tiles} tiles, and counters for {len(arrived)}"
    scaled = torch.empty_like(residual)
    squares = residual.new_empty((tiles, block_m))
    parts = residual.new_empty((tiles, slices, block_m, config.block_n)) if slices > 1 else scaled
    _add_product[(tiles, slices)](
        x,
        weight,
        weight if bias is None else bias,
        residual,
        norm_weight,
        scaled,
        squares,
        parts,
        arrived,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SLICES=slices,
        SLICE=per_slice * config.block_k,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PRECISION=precision_of(weight),
        STAGES=config.num_stages,
        **launch_options(config),
    )
    return NormedRows(scaled, squares, eps)


def prepare_norm(residual: Tensor, norm_weight: Tensor, eps: float) -> NormedRows:
    """What ``add_product`` returns, for a residual stream to which nothing has been added yet."""
    squares = F.pad(residual.square().sum(-1), (0, padded(len(residual)) - len(residual)))
    return NormedRows(residual * norm_weight, squares[None], eps)
