"""Products with few rows whose outputs are needed in pairs: gate and up, and the two halves of a rotated head.

With up to 32 rows a product takes as long as reading its weight. One kernel therefore does the work of three: it norms
its input, multiplies, and applies the activation or the rotary embedding to the result before anything is written.

The input is the residual stream as ``skinny_sums.add_product`` leaves it: scaled by the weight of the norm, with sums
of squares beside it. Each program completes the norm of the columns that it is about to multiply. The normed value is
rounded to the weight's type before the product, as by the separate norm kernel and by the learner.

A tile of the weight holds the two members of a pair in neighbouring rows. Both results are then in the same thread.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_ROWS = 16
MAX_ROWS = 32
_FULL_DEVICE = 120
"""Programs that keep a device with 132 multiprocessors busy."""


@dataclass(frozen=True)
class SkinnyConfig:
    """Tile sizes of a product with few rows: outputs (n) and inputs (k), and the slices of the sum over inputs."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    slices: int = 1
    dependent: bool = False
    """Start while the kernel before ends, and read the first tile of the weight meanwhile. Not measured yet."""


@dataclass(frozen=True)
class NormedRows:
    """The input of a norm: ``residual * weight`` in float32 [rows, size], and the sums of the squares of ``residual``.

    ``squares`` has a line for each block of columns, [blocks, ``padded(rows)``].
    """

    scaled: Tensor
    squares: Tensor
    eps: float


def padded(rows: int) -> int:
    """The rows of a tile: matrix instructions handle at least 16."""
    assert rows <= MAX_ROWS, f"{rows} rows: these kernels handle at most {MAX_ROWS}"
    return _MIN_ROWS if rows <= _MIN_ROWS else MAX_ROWS


def pair_config(outputs: int) -> SkinnyConfig:
    """The widest tiles that still give every multiprocessor a program. Not measured yet.

    Several programs with wide tiles share a multiprocessor. A narrow tile has to be longer, and more of them have to be
    on their way, for the same number of bytes in flight.
    """
    if outputs >= 64 * _FULL_DEVICE:
        return SkinnyConfig(block_n=64, block_k=128, num_warps=4, num_stages=4)
    block_n = 32 if outputs >= 32 * _FULL_DEVICE else 16
    return SkinnyConfig(block_n=block_n, block_k=256, num_warps=4, num_stages=5)


@triton.jit
def _inverse_rms(squares, rows, eps, SIZE: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
                 BLOCK_M: tl.constexpr):  # fmt: skip
    parts = tl.arange(0, PARTS_PAD)
    sums = tl.load(squares + parts[:, None] * BLOCK_M + rows[None, :], mask=parts[:, None] < PARTS, other=0.0)
    return tl.rsqrt(tl.sum(sums, axis=0) / SIZE + eps)


@triton.jit
def weight_tile(weight, outputs, first, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """``BLOCK_K`` inputs of the rows ``outputs`` of a weight, which is read once and need not stay in a cache."""
    columns = first + tl.arange(0, BLOCK_K)
    address = weight + outputs[:, None] * SIZE + columns[None, :]
    if SIZE % BLOCK_K == 0:
        return tl.load(address, eviction_policy="evict_first")
    return tl.load(address, mask=(columns < SIZE)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def input_tile(x, num_rows, first, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_K)
    mask = (rows < num_rows)[:, None]
    if SIZE % BLOCK_K != 0:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(x + rows[:, None] * SIZE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _pair_products(
    scaled,
    squares,
    weight,
    bias,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_PAD: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows ``p`` and ``p + HALF`` of the weight times the normed rows, rounded; both [BLOCK_M, BLOCK_N / 2]."""
    rows = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_N)
    # Programs at the end repeat the last pair rather than mask their loads.
    pairs = tl.minimum(tl.program_id(0) * (BLOCK_N // 2) + lanes // 2, NUM_PAIRS - 1)
    outputs = (pairs // HALF) * (2 * HALF) + pairs % HALF + (lanes % 2) * HALF
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dtype: tl.constexpr = weight.dtype.element_ty
    start: tl.constexpr = BLOCK_K if DEPENDENT else 0
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tile = weight_tile(weight, outputs, 0, SIZE, BLOCK_K)
        tl.extra.cuda.gdc_wait()  # what follows reads results of the kernel before
        inverse_rms = _inverse_rms(squares, rows, eps, SIZE, SQUARES, SQUARES_PAD, BLOCK_M)[:, None]
        normed = (input_tile(scaled, num_rows, 0, SIZE, BLOCK_M, BLOCK_K) * inverse_rms).to(dtype)
        total = tl.dot(normed, tile.T, total, input_precision=PRECISION)
    else:
        inverse_rms = _inverse_rms(squares, rows, eps, SIZE, SQUARES, SQUARES_PAD, BLOCK_M)[:, None]
    for first in tl.range(start, SIZE, BLOCK_K, num_stages=STAGES):
        tile = weight_tile(weight, outputs, first, SIZE, BLOCK_K)
        normed = (input_tile(scaled, num_rows, first, SIZE, BLOCK_M, BLOCK_K) * inverse_rms).to(dtype)
        total = tl.dot(normed, tile.T, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + outputs).to(tl.float32)[None, :]
    return tl.split(tl.reshape(total.to(dtype), (BLOCK_M, BLOCK_N // 2, 2)))


@triton.jit(do_not_specialize=["num_rows"])
def _normed_gate_up(
    scaled, squares, weight, bias, out, num_rows, eps,
    SIZE: tl.constexpr, SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr, NUM_PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    gate, up = _pair_products(
        scaled, squares, weight, bias, num_rows, eps, SIZE, SQUARES, SQUARES_PAD, NUM_PAIRS, NUM_PAIRS, HAS_BIAS,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, STAGES, DEPENDENT,
    )  # fmt: skip
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    result = (activated * up.to(tl.float32)).to(gate.dtype)
    rows = tl.arange(0, BLOCK_M)
    pairs = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    mask = (rows < num_rows)[:, None] & (pairs < NUM_PAIRS)[None, :]
    tl.store(out + rows[:, None] * NUM_PAIRS + pairs[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _normed_qkv(
    scaled, squares, weight, bias, cos, sin, positions, slots, k_cache, v_cache, out, num_rows,
    cos_stride, sin_stride, page_stride, head_stride, token_stride, eps,
    SIZE: tl.constexpr, SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, ROTATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    NUM_PAIRS: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HALF
    low, high = _pair_products(
        scaled, squares, weight, bias, num_rows, eps, SIZE, SQUARES, SQUARES_PAD, NUM_PAIRS, HALF, HAS_BIAS,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, STAGES, DEPENDENT,
    )  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    pairs = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    head, dim = pairs // HALF, pairs % HALF
    mask = (rows < num_rows)[:, None] & (pairs < NUM_PAIRS)[None, :]
    if ROTATE:
        position = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.int64)
        slot = tl.load(slots + rows, mask=rows < num_rows, other=0).to(tl.int64)
        cosine = tl.load(cos + position[:, None] * cos_stride + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        sine = tl.load(sin + position[:, None] * sin_stride + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        rotated_low = (wide_low * cosine - wide_high * sine).to(low.dtype)
        rotated_high = (wide_high * cosine + wide_low * sine).to(low.dtype)

        of_query = mask & (head < NUM_HEADS)[None, :]
        q_address = out + (rows[:, None] * NUM_HEADS + head[None, :]) * (2 * HALF) + dim[None, :]
        tl.store(q_address, rotated_low, mask=of_query)
        tl.store(q_address + HALF, rotated_high, mask=of_query)
        place = ((slot // PAGE) * page_stride + (slot % PAGE) * token_stride)[:, None] + dim[None, :]
        of_key = mask & ((head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS))[None, :]
        k_address = k_cache + place + ((head - NUM_HEADS) * head_stride)[None, :]
        tl.store(k_address, rotated_low, mask=of_key)
        tl.store(k_address + HALF, rotated_high, mask=of_key)
        of_value = mask & (head >= NUM_HEADS + NUM_KV_HEADS)[None, :]
        v_address = v_cache + place + ((head - NUM_HEADS - NUM_KV_HEADS) * head_stride)[None, :]
        tl.store(v_address, low, mask=of_value)
        tl.store(v_address + HALF, high, mask=of_value)
    else:
        address = out + rows[:, None] * (2 * NUM_PAIRS) + (head * (2 * HALF) + dim)[None, :]
        tl.store(address, low, mask=mask)
        tl.store(address + HALF, high, mask=mask)


def normed_gate_up(x: NormedRows, weight: Tensor, bias: Tensor | None, config: SkinnyConfig | None = None) -> Tensor:
    """``silu(gate) * up`` of the normed rows and the merged ``weight`` [2 * intermediate, hidden], gate first."""
    config, rows = config or pair_config(len(weight)), len(x.scaled)
    size = len(weight) // 2
    out = torch.empty((rows, size), dtype=weight.dtype, device=weight.device)
    _normed_gate_up[(triton.cdiv(size, config.block_n // 2),)](
        x.scaled,
        x.squares,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        x.eps,
        NUM_PAIRS=size,
        HAS_BIAS=bias is not None,
        **_shapes(x, weight, config),
    )
    return out


def normed_qkv(
    x: NormedRows,
    weight: Tensor,
    bias: Tensor | None,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    caches: tuple[Tensor, Tensor],
    num_heads: int,
    *,
    rotate: bool = True,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """Project the normed rows, rotate, and write keys and values to slots. Returns queries [rows, heads, head_dim].

    ``tables`` are cosines and sines over positions. With ``rotate=False``, for models that norm their heads first, it
    returns the projection [rows, (heads + 2 kv_heads) * head_dim] and writes nothing else.
    """
    config, rows = config or pair_config(len(weight)), len(x.scaled)
    (cos, sin), (k_cache, v_cache) = tables, caches
    kv_heads, page_tokens, head_dim = k_cache.shape[1:]
    assert head_dim % 2 == 0, f"head_dim = {head_dim}: rotary positions need an even number"
    assert len(weight) == (num_heads + 2 * kv_heads) * head_dim, f"the weight has {len(weight)} outputs"
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must have the same strides"
    assert k_cache.stride(3) == 1, "the cache's head_dim must be its innermost, contiguous dimension"
    shape = (rows, num_heads, head_dim) if rotate else (rows, len(weight))
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    _normed_qkv[(triton.cdiv(len(weight), config.block_n),)](
        x.scaled,
        x.squares,
        weight,
        weight if bias is None else bias,
        cos,
        sin,
        positions,
        slots,
        k_cache,
        v_cache,
        out,
        rows,
        cos.stride(0),
        sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        x.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        PAGE=page_tokens,
        ROTATE=rotate,
        HAS_BIAS=bias is not None,
        **_shapes(x, weight, config),
    )
    return out


def _shapes(x: NormedRows, weight: Tensor, config: SkinnyConfig) -> dict[str, int | str]:
    rows, size = x.scaled.shape
    block_m = padded(rows)
    check_weight(weight, size)
    assert x.scaled.is_contiguous(), "x must be contiguous"
    assert x.squares.shape[1] == block_m, f"sums of squares of {x.squares.shape[1]} rows, not {block_m}"
    return {
        "SIZE": size,
        "SQUARES": len(x.squares),
        "SQUARES_PAD": triton.next_power_of_2(len(x.squares)),
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PRECISION": precision_of(weight),
        "STAGES": config.num_stages,
        **launch_options(config),
    }


def launch_options(config: SkinnyConfig) -> dict[str, int]:
    options = {"num_warps": config.num_warps, "DEPENDENT": config.dependent}
    return options | {"launch_pdl": True} if config.dependent else options


def precision_of(weight: Tensor) -> str:
    return "ieee" if weight.dtype == torch.float32 else "tf32"


def check_weight(weight: Tensor, inputs: int) -> None:
    assert weight.is_contiguous(), "weight must be contiguous"
    assert weight.shape[1] == inputs, f"x has {inputs} inputs and the weight {weight.shape[1]}"
    assert weight.numel() < 2**31, f"a weight of {weight.numel()} values: these kernels use 32-bit offsets"
