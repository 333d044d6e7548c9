"""Matrix products: ``invariant_linear`` for deterministic mode, ``split_linear`` to occupy the whole device.

``invariant_linear`` gives a row the same bits whatever other rows there are. It reads operands through tensor
descriptors, which fill out-of-range values with zeros, so tiles need no masks. ``invariant_parts`` does the same for a
long sum in slices, whose number depends on the weight alone: with few rows a program computes one slice and the norm
that follows adds them, with many rows a program computes all of them and adds them in the same order.

``split_linear`` cuts the sum over inputs into slices. With a few hundred rows, a product such as 8960 -> 1536 has fewer
result tiles than the device has multiprocessors. cuBLAS splits the sum too, but needs a separate launch to add the
parts. Here one batched product returns the parts in float32, and ``sum_add_rms_norm``, which follows anyway, adds them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_SLICE_MULTIPLE = 64
_TILE = 128
_MAX_TILES = 100
_MAX_SLICES = 5
_LONG_SUM = 4096
_INVARIANT_SLICES = 4
_PROCESSORS = 132
SCALED_TILES_ON = (9, 0)
"""The compute capability (H100 and H200) on which deterministic mode adapts tiles to the number of rows.

It also cuts long sums into slices there. Larger tiles read less from the L2 cache. A result is summed over inputs in
the same steps of the same instruction in every tile size, so its bits do not depend on the size;
``tests/gpu/test_invariant_cuda.py`` compares them. Other GPUs use fixed tiles, because they have other instructions or
less memory, and their bits were not compared.
"""


@dataclass(frozen=True)
class MatmulConfig:
    """Tile sizes of a product: tokens (m), outputs (n) and inputs (k)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_FIXED_TILES = MatmulConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=5)
_FIXED_WIDE_TILES = MatmulConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=5)
_FLOAT32_TILES = MatmulConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
# From the largest, with the number of tiles from which each is used. All have the same ``block_k``.
_SCALED_TILES = (
    (2 * _PROCESSORS, MatmulConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3)),
    (3 * _PROCESSORS // 2, MatmulConfig(block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=3)),
    (_PROCESSORS, MatmulConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)),
    (0, _FIXED_TILES),
)

# Room for two sums in the registers: one of the present slice, one of those before.
_TOGETHER_TILES = MatmulConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4)


def has_scaled_tiles(device: torch.device) -> bool:
    """Also without a GPU, in Triton's interpreter."""
    return (_capability(device) if device.type == "cuda" else (9, 0)) == SCALED_TILES_ON


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def invariant_config(x: Tensor, outputs: int, slices: int = 1) -> MatmulConfig:
    """The tiles of an invariant product. ``slices`` is the number of programs that share a tile of the result."""
    if x.element_size() == 4:
        return _FLOAT32_TILES
    if not has_scaled_tiles(x.device):
        return _FIXED_WIDE_TILES if outputs >= 8192 else _FIXED_TILES
    return next(config for fewest, config in _SCALED_TILES if num_tiles(config, len(x), outputs) * slices >= fewest)


def num_tiles(config: MatmulConfig, tokens: int, outputs: int) -> int:
    return -(-tokens // config.block_m) * -(-outputs // config.block_n)


def invariant_slices(inputs: int) -> int:
    """The slices of an invariant sum. They depend on the weight alone, so that all passes add the same numbers."""
    if inputs < _LONG_SUM:
        return 1
    return max((slices for slices in possible_slices(inputs) if slices <= _INVARIANT_SLICES), default=1)


@triton.jit
def _slice(x, weight, first_token, first_output, first_input, num_inputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, (num_inputs + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        tokens = x.load([first_token, first_input + k * BLOCK_K])
        outputs = weight.load([first_output, first_input + k * BLOCK_K])
        total = tl.dot(tokens, outputs.T, total, input_precision=PRECISION)
    return total


@triton.jit
def _linear(
    x,
    weight,
    bias,
    out,
    num_tokens,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SLICES: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``num_inputs`` is the length of a slice. With ``TOGETHER`` a program adds all slices, else it writes one."""
    # Neighbouring programs share a tile of the weight, so it is read from memory once.
    first_token = tl.program_id(0) * BLOCK_M
    first_output = tl.program_id(1) * BLOCK_N
    part = tl.program_id(2)
    total = _slice(x, weight, first_token, first_output, part * num_inputs, num_inputs,
                   BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, STAGES)  # fmt: skip
    if TOGETHER:
        for index in range(1, SLICES):
            total += _slice(x, weight, first_token, first_output, index * num_inputs, num_inputs,
                            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, STAGES)  # fmt: skip

    rows = first_token + tl.arange(0, BLOCK_M)
    columns = first_output + tl.arange(0, BLOCK_N)
    mask = (rows < num_tokens)[:, None] & (columns < num_outputs)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[None, :]
    place = (part * num_tokens + rows).to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: MatmulConfig | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, with every row summed in a fixed order that does not depend on the number of rows.

    Sums are float32. They are rounded to ``out_dtype``, by default the type of ``x``.
    """
    config = config or invariant_config(x, len(weight))
    out = torch.empty((len(x), len(weight)), dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, weight, bias, out, config, slices=1, together=False)
    return out


def invariant_parts(x: Tensor, weight: Tensor, config: MatmulConfig | None = None) -> Tensor:
    """The parts of ``x @ weight.T`` in float32, ``[parts, rows, outputs]``, for ``sum_add_rms_norm``.

    They are the slices of the sum, or one part that is their sum. Their sum has the same bits in both cases.
    """
    tokens, outputs, slices = len(x), len(weight), invariant_slices(x.shape[1])
    config = config or invariant_config(x, outputs, slices)
    # With enough tiles for all multiprocessors, writing several parts is not worth it.
    together = slices > 1 and num_tiles(_TOGETHER_TILES, tokens, outputs) >= _PROCESSORS
    if together and x.element_size() == 2:
        config = _TOGETHER_TILES
    out = torch.empty((1 if together else slices, tokens, outputs), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, config, slices, together)
    return out


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Whether they belong together, and tensor descriptors can describe both."""
    assert x.shape[1] == weight.shape[1], f"x has {x.shape[1]} inputs and the weight {weight.shape[1]}"
    assert x.is_contiguous(), "x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    row_bytes = x.shape[1] * x.element_size()
    assert row_bytes % 16 == 0, f"rows of {row_bytes} bytes: tensor descriptors need a multiple of 16"


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: MatmulConfig, slices: int, together: bool
) -> None:
    check_operands(x, weight)
    (tokens, inputs), outputs = x.shape, len(weight)
    assert slices == 1 or inputs % (slices * config.block_k) == 0, f"{inputs} inputs in {slices} slices"
    grid = triton.cdiv(tokens, config.block_m), triton.cdiv(outputs, config.block_n), 1 if together else slices
    _linear[grid](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        out if bias is None else bias,
        out,
        tokens,
        outputs,
        inputs // slices,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HAS_BIAS=bias is not None,
        SLICES=slices,
        TOGETHER=together,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def suggest_slices(rows: int, outputs: int, inputs: int) -> int:
    """The number of slices that brings the result tiles close to the number of multiprocessors; 1 to not split.

    The best values measured on an H200: for 8960 -> 1536, 5 slices up to 128 rows, 4 at 256, 2 at 512 and 1 above; for
    1536 -> 1536, 2 slices up to 256 rows.
    """
    tiles = -(-rows // _TILE) * -(-outputs // _TILE)
    most = min(_MAX_TILES // tiles, _MAX_SLICES if inputs >= _LONG_SUM else 2)
    if inputs < _LONG_SUM and rows > 2 * _TILE:
        return 1
    return max((slices for slices in possible_slices(inputs) if slices <= most), default=1)


def possible_slices(inputs: int) -> list[int]:
    """Numbers of equal slices whose length is a multiple of what one step of the product reads."""
    return [slices for slices in range(1, 11) if inputs % (slices * _SLICE_MULTIPLE) == 0]


def split_linear(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    """The parts of ``x @ weight.T`` as float32 ``[slices, rows, outputs]``. Their sum is the product."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert inputs % slices == 0, f"slices = {slices}: must divide the {inputs} inputs"
    left = x.view(rows, slices, -1).transpose(0, 1)
    right = weight.view(outputs, slices, -1).permute(1, 2, 0)
    if x.dtype == torch.float32:
        return torch.bmm(left, right)
    if x.device.type == "cuda":
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())  # torch has no product with a wider result type on a CPU
