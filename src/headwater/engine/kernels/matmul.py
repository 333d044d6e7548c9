"""Matrix products where the vendor's library does not fit.

``invariant_linear`` gives a row the same bits whatever rows stand beside it; ``split_k_linear`` occupies the whole
device with the small products of a decode step; ``gate_up_silu`` activates before anything is written.

Operands are read through tensor descriptors, which fill what lies outside with zeros, so tiles need no masks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.engine.kernels.activation import silu

_MAX_TILES = 8192
_WARP_GROUP_ROWS = 64


@dataclass(frozen=True)
class MatmulConfig:
    """How a product is cut: tiles of tokens (m), of outputs (n) and of inputs (k), and parts of the sum over inputs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


def invariant_config(outputs: int, element_bytes: int) -> MatmulConfig:
    """Depends on the weight alone: the number of tokens must not change how a row is summed."""
    if element_bytes == 4:
        return MatmulConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
    block_n = 128 if outputs >= 8192 else 64
    return MatmulConfig(block_m=64, block_n=block_n, block_k=64, num_warps=4, num_stages=5)


def split_k_config(tokens: int, outputs: int, inputs: int, element_bytes: int) -> MatmulConfig:
    """Enough parts of the sum for about two programs per multiprocessor of a large device."""
    if element_bytes == 4:
        return MatmulConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2, split_k=2)
    block_m = min(max(16, triton.next_power_of_2(tokens)), 64 if tokens <= 64 else 128)
    block_k = 128 if block_m <= 32 else 64
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(outputs, 64)
    split_k = max(1, min(264 // tiles, inputs // block_k // 4, 16))
    num_warps = 8 if block_m == 128 else 4
    return MatmulConfig(block_m, 64, block_k, num_warps, num_stages=4, split_k=split_k)


def gate_up_config(tokens: int, element_bytes: int) -> MatmulConfig:
    if element_bytes == 4:
        return MatmulConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
    if tokens <= 64:
        block_m = max(16, triton.next_power_of_2(tokens))
        return MatmulConfig(block_m, block_n=64, block_k=64, num_warps=4, num_stages=4)
    return MatmulConfig(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=4)


def split_k_counters(device: torch.device) -> Tensor:
    """What ``split_k_linear`` counts finished parts in: made once per stream, zero between calls."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def _linear(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    counters,
    num_tokens,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SWAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbouring programs share a tile of the weight, so it comes from memory once.
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    first_token = tile_m * BLOCK_M
    first_output = tile_n * BLOCK_N
    num_steps = (num_inputs + BLOCK_K - 1) // BLOCK_K
    per_split = (num_steps + SPLIT_K - 1) // SPLIT_K
    end = tl.minimum((split + 1) * per_split, num_steps)
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(split * per_split, end, num_stages=STAGES):
        tokens = x.load([first_token, k * BLOCK_K])
        outputs = weight.load([first_output, k * BLOCK_K])
        if SWAP:
            # With few tokens the weight takes the rows of the product: tensor cores want 64 of them.
            total = tl.dot(outputs, tokens.T, total, input_precision=PRECISION)
        else:
            total = tl.dot(tokens, outputs.T, total, input_precision=PRECISION)
    if SWAP:
        total = total.T

    rows = first_token + tl.arange(0, BLOCK_M)
    columns = first_output + tl.arange(0, BLOCK_N)
    mask = (rows < num_tokens)[:, None] & (columns < num_outputs)[None, :]
    place = rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    if SPLIT_K > 1:
        plane = num_tokens.to(tl.int64) * num_outputs
        tl.store(partial + split * plane + place, total, mask=mask)
        # All of the part must be written before it is counted; whoever counts last sums all parts, in order.
        tl.debug_barrier()
        counter = counters + tile_n * tl.num_programs(0) + tile_m
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(partial + part * plane + place, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
            _finish(total, bias, residual, out, columns, num_outputs, place, mask, HAS_BIAS, HAS_RESIDUAL)
    else:
        _finish(total, bias, residual, out, columns, num_outputs, place, mask, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _finish(
    total, bias, residual, out, columns, num_outputs, place, mask, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_RESIDUAL:
        # Rounded before the addition, as if the product had been written first.
        total = total.to(dtype).to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(dtype), mask=mask)


@triton.jit
def _gate_up_silu(
    x,
    weight,
    out,
    num_tokens,
    num_inputs,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    first_token = tl.program_id(0) * BLOCK_M
    first_output = tl.program_id(1) * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, (num_inputs + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        tokens = x.load([first_token, k * BLOCK_K])
        gate_rows = weight.load([first_output, k * BLOCK_K])
        up_rows = weight.load([SIZE + first_output, k * BLOCK_K])
        if SWAP:
            gate = tl.dot(gate_rows, tokens.T, gate, input_precision=PRECISION)
            up = tl.dot(up_rows, tokens.T, up, input_precision=PRECISION)
        else:
            gate = tl.dot(tokens, gate_rows.T, gate, input_precision=PRECISION)
            up = tl.dot(tokens, up_rows.T, up, input_precision=PRECISION)

    # Rounded where the separate product and activation would round.
    dtype: tl.constexpr = out.dtype.element_ty
    activated = silu(gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    result = (activated * up.to(dtype).to(tl.float32)).to(dtype)
    if SWAP:
        result = result.T
    rows = first_token + tl.arange(0, BLOCK_M)
    columns = first_output + tl.arange(0, BLOCK_N)
    mask = (rows < num_tokens)[:, None] & (columns < SIZE)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * SIZE + columns[None, :], result, mask=mask)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with every row summed in one fixed order, whatever the number of rows."""
    config = invariant_config(weight.shape[0], x.element_size())
    return _launch_linear(x, weight, bias, None, None, config, swap=False)


def split_k_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    counters: Tensor,
    config: MatmulConfig | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, then ``+ residual``, with the sum over inputs shared out among programs.

    ``counters`` comes from ``split_k_counters``; calls that may overlap in time need their own. The parts are added in
    a fixed order: the same call gives the same bits, but other numbers of tokens may choose other parts.
    """
    config = config or split_k_config(x.shape[0], weight.shape[0], x.shape[1], x.element_size())
    # Warp-group multiplication needs 64 rows; a smaller tile of tokens becomes its columns.
    swap = config.block_m < _WARP_GROUP_ROWS <= config.block_n
    return _launch_linear(x, weight, bias, residual, counters, config, swap=swap)


def gate_up_silu(x: Tensor, weight: Tensor, *, config: MatmulConfig | None = None) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` for ``weight`` [2 * intermediate, hidden], gate rows first."""
    _check(x, weight)
    config = config or gate_up_config(x.shape[0], x.element_size())
    tokens, size = x.shape[0], weight.shape[0] // 2
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    _gate_up_silu[(triton.cdiv(tokens, config.block_m), triton.cdiv(size, config.block_n))](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        out,
        tokens,
        x.shape[1],
        SIZE=size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SWAP=config.block_m < _WARP_GROUP_ROWS <= config.block_n,
        PRECISION=_precision(x),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


def _launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    counters: Tensor | None,
    config: MatmulConfig,
    *,
    swap: bool,
) -> Tensor:
    _check(x, weight)
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    tiles = (triton.cdiv(tokens, config.block_m), triton.cdiv(outputs, config.block_n))
    partial = out
    if config.split_k > 1:
        assert tiles[0] * tiles[1] <= _MAX_TILES, f"{tiles} tiles are too many to count; use split_k = 1"
        partial = torch.empty((config.split_k, tokens, outputs), dtype=torch.float32, device=x.device)
    assert residual is None or residual.is_contiguous(), "residual must be contiguous"
    _linear[(*tiles, config.split_k)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        partial,
        out if counters is None else counters,
        tokens,
        outputs,
        inputs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        SWAP=swap,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        PRECISION=_precision(x),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.shape[1] == weight.shape[1], f"x has {x.shape[1]} inputs and the weight {weight.shape[1]}"
    assert x.is_contiguous(), "x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    row_bytes = x.shape[1] * x.element_size()
    assert row_bytes % 16 == 0, f"rows of {row_bytes} bytes: tensor descriptors need a multiple of 16"
