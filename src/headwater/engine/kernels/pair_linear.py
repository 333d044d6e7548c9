"""Products for 33 and more rows whose outputs are needed in pairs: gate and up, and the two halves of a rotated head.

A program computes the two members of each pair and applies the activation or the rotary embedding before anything is
written, which saves a launch and a round trip through memory. Operands are read through tensor descriptors. Values are
rounded at the same places as on the plain path: the product, SiLU and its product with up, queries and keys.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwater.engine.kernels.linear import MatmulConfig


@dataclass(frozen=True)
class PairConfig:
    """Tile sizes of a product in pairs: tokens (m), pairs of outputs (p) and inputs (k)."""

    block_m: int
    block_p: int
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, config: MatmulConfig) -> PairConfig:
        """Tiles with as many outputs, whose results are summed in the same steps."""
        return cls(config.block_m, config.block_n // 2, config.block_k, config.num_warps, config.num_stages)


@triton.jit
def _pair_products(x, weight, bias, first_row, first, second, num_inputs, HAS_BIAS: tl.constexpr, dtype: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """The outputs from ``first`` on and those from ``second`` on, rounded; both [BLOCK_M, BLOCK_P]."""
    first_sum = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    second_sum = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    for k in tl.range(0, (num_inputs + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        rows = x.load([first_row, k * BLOCK_K])
        first_weight = weight.load([first, k * BLOCK_K])
        second_weight = weight.load([second, k * BLOCK_K])
        first_sum = tl.dot(rows, first_weight.T, first_sum, input_precision=PRECISION)
        second_sum = tl.dot(rows, second_weight.T, second_sum, input_precision=PRECISION)
    if HAS_BIAS:
        lanes = tl.arange(0, BLOCK_P)
        # Lanes beyond the last pair read values of other pairs or of the last one, and are not stored.
        num_outputs = weight.shape[0]
        first_sum += tl.load(bias + tl.minimum(first + lanes, num_outputs - 1)).to(tl.float32)[None, :]
        second_sum += tl.load(bias + tl.minimum(second + lanes, num_outputs - 1)).to(tl.float32)[None, :]
    return first_sum.to(dtype), second_sum.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_linear(
    x, weight, bias, out, num_rows, num_pairs, num_inputs,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share a tile of the weight, so it is read from memory once.
    first_row, first_pair = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_P
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = _pair_products(
        x, weight, bias, first_row, first_pair, num_pairs + first_pair, num_inputs, HAS_BIAS, dtype,
        BLOCK_M, BLOCK_P, BLOCK_K, PRECISION, STAGES,
    )  # fmt: skip
    wide = gate.to(tl.float32)
    activated = wide / (1.0 + tl.exp(-wide))
    result = activated.to(dtype).to(tl.float32) * up.to(tl.float32)
    rows, pairs = first_row + tl.arange(0, BLOCK_M), first_pair + tl.arange(0, BLOCK_P)
    mask = (rows < num_rows)[:, None] & (pairs < num_pairs)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * num_pairs + pairs[None, :], result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rotated_linear(
    x, weight, bias, cos, sin, positions, slots, k_cache, v_cache, out, num_rows, num_inputs,
    cos_stride, sin_stride, page_stride, head_stride, token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * BLOCK_M
    # All pairs of a program are in one head.
    BLOCKS: tl.constexpr = HALF // BLOCK_P
    head, first_dim = tl.program_id(1) // BLOCKS, (tl.program_id(1) % BLOCKS) * BLOCK_P
    first = head * (2 * HALF) + first_dim
    dtype: tl.constexpr = out.dtype.element_ty
    low, high = _pair_products(
        x, weight, bias, first_row, first, first + HALF, num_inputs, HAS_BIAS, dtype,
        BLOCK_M, BLOCK_P, BLOCK_K, PRECISION, STAGES,
    )  # fmt: skip
    rows, dims = first_row + tl.arange(0, BLOCK_M), first_dim + tl.arange(0, BLOCK_P)
    has_row = rows < num_rows
    mask = has_row[:, None]
    slot = tl.load(slots + rows, mask=has_row, other=0).to(tl.int64)
    place = ((slot // PAGE) * page_stride + (slot % PAGE) * token_stride)[:, None] + dims[None, :]
    if head >= NUM_HEADS + NUM_KV_HEADS:
        address = v_cache + place + (head - NUM_HEADS - NUM_KV_HEADS) * head_stride
        tl.store(address, low, mask=mask)
        tl.store(address + HALF, high, mask=mask)
    else:
        position = tl.load(positions + rows, mask=has_row, other=0).to(tl.int64)
        cosine = tl.load(cos + position[:, None] * cos_stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        sine = tl.load(sin + position[:, None] * sin_stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        rotated_low = (wide_low * cosine - wide_high * sine).to(dtype)
        rotated_high = (wide_high * cosine + wide_low * sine).to(dtype)
        if head >= NUM_HEADS:
            address = k_cache + place + (head - NUM_HEADS) * head_stride
            tl.store(address, rotated_low, mask=mask)
            tl.store(address + HALF, rotated_high, mask=mask)
        else:
            address = out + (rows.to(tl.int64)[:, None] * NUM_HEADS + head) * (2 * HALF) + dims[None, :]
            tl.store(address, rotated_low, mask=mask)
            tl.store(address + HALF, rotated_high, mask=mask)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: PairConfig) -> Tensor:
    """``silu(gate) * up`` of ``x`` [rows, hidden] and the merged ``weight`` [2 * intermediate, hidden], gate first."""
    rows, size = len(x), len(weight) // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    _gated_linear[(triton.cdiv(rows, config.block_m), triton.cdiv(size, config.block_p))](
        *_operands(x, weight, bias, config),
        out,
        rows,
        size,
        x.shape[1],
        **_options(x, bias, config),
    )
    return out


def rotated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    caches: tuple[Tensor, Tensor],
    num_heads: int,
    config: PairConfig,
) -> Tensor:
    """Project ``x`` [rows, hidden], rotate, write keys and values to slots. Returns queries [rows, heads, head_dim].

    ``tables`` are cosines and sines over positions. ``config.block_p`` must divide half of ``head_dim``.
    """
    (cos, sin), (k_cache, v_cache), rows = tables, caches, len(x)
    kv_heads, page_tokens, head_dim = k_cache.shape[1:]
    assert can_rotate(head_dim, config), f"block_p = {config.block_p} does not divide half of head_dim = {head_dim}"
    assert len(weight) == (num_heads + 2 * kv_heads) * head_dim, f"the weight has {len(weight)} outputs"
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must have the same strides"
    assert k_cache.stride(3) == 1, "the cache's head_dim must be its innermost, contiguous dimension"
    out = torch.empty((rows, num_heads, head_dim), dtype=x.dtype, device=x.device)
    _rotated_linear[(triton.cdiv(rows, config.block_m), len(weight) // (2 * config.block_p))](
        *_operands(x, weight, bias, config),
        cos,
        sin,
        positions,
        slots,
        k_cache,
        v_cache,
        out,
        rows,
        x.shape[1],
        cos.stride(0),
        sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        PAGE=page_tokens,
        **_options(x, bias, config),
    )
    return out


def can_rotate(head_dim: int, config: PairConfig) -> bool:
    return head_dim % (2 * config.block_p) == 0


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether tensor descriptors can describe both."""
    return x.is_contiguous() and weight.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None, config: PairConfig) -> tuple[object, object, Tensor]:
    assert x.shape[1] == weight.shape[1], f"x has {x.shape[1]} inputs and the weight {weight.shape[1]}"
    assert fits(x, weight), "x and weight must be contiguous, with rows of a multiple of 16 bytes"
    return (
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_p, config.block_k]),
        x if bias is None else bias,
    )


def _options(x: Tensor, bias: Tensor | None, config: PairConfig) -> dict[str, int | str]:
    return {
        "HAS_BIAS": bias is not None,
        "BLOCK_M": config.block_m,
        "BLOCK_P": config.block_p,
        "BLOCK_K": config.block_k,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
