"""What ``decode_products.py`` measures: each product of a layer, plain and with the kernel after it, and the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from kernel_parts import CONTEXT, DEVICE, DTYPE, EPS, HIDDEN, MODEL, PAGE, PRODUCTS, SCALE, Pages, cold, randn
from kernel_parts import microseconds as time_of
from shapes import build_model
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.attention import cuda as cuda_attention
from headwater.engine.attention.cuda import CudaDecode, CudaPrefill
from headwater.engine.kernels import linear, prefill_attention
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.linear import MatmulConfig, invariant_linear, invariant_parts
from headwater.engine.kernels.norm import add_rms_norm, sum_add_rms_norm
from headwater.engine.kernels.pair_linear import PairConfig, gated_linear, rotated_linear
from headwater.engine.kernels.prefill_attention import PrefillConfig
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec
from headwater.engine.runners.cuda import CudaOps, InvariantCudaOps
from headwater.engine.runners.decoder import FusedDecoder, PairedProducts
from headwater.engine.runners.paired import GATE_UP, InvariantPairs

MODELS = (MODEL, "smollm2")
# Heads, kv heads, head dimension, hidden and intermediate size, biases of q, k and v.
SIZES = {MODEL: (12, 2, 128, 1536, 8960, True), "smollm2": (9, 3, 64, 576, 1536, False)}
COMPILED_ROWS = 64
# Tokens, pairs and inputs per tile, warps, stages.
GATED = [
    PairConfig(*each)
    for each in (
        (128, 64, 64, 4, 3), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3), (64, 32, 64, 4, 4), (128, 64, 64, 8, 4),
        (256, 64, 64, 8, 3), (64, 32, 128, 4, 3),
    )
]  # fmt: skip
_SHORT_HEADS = ((64, 32, 64, 4, 5), (64, 32, 128, 4, 4), (64, 16, 128, 4, 4), (128, 32, 64, 4, 4))
ROTATED = {
    "smollm2": [PairConfig(*each) for each in _SHORT_HEADS],
    MODEL: [PairConfig(*each) for each in (*_SHORT_HEADS, (64, 64, 64, 4, 5), (128, 64, 64, 8, 4))],
}
# Tokens, outputs and inputs per tile, warps, stages. The first is the one that others must agree with bit for bit.
MATMULS = [
    MatmulConfig(*each)
    for each in (
        (64, 64, 64, 4, 5), (64, 128, 64, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
    )
]  # fmt: skip
# Rows (queries times heads) and keys per tile, warps, stages. The first is the present one.
ATTENTION = [PrefillConfig(*each) for each in ((64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 4))]


def weights_of(outputs: int, inputs: int, number: int | None) -> list[Tensor]:
    """``number`` weights, or as many as exceed the L2 cache several times."""
    if number is not None:
        return [randn(outputs, inputs, scale=0.03) for _ in range(number)]
    return cold(lambda: randn(outputs, inputs, scale=0.03), outputs * inputs * DTYPE.itemsize)


class PairedProduct:
    """Gate and up with SiLU, or q, k, v with rotary embedding and store, over weights that are not in the L2 cache."""

    def __init__(self, model: str, product: str, rows: int, num_weights: int | None = None) -> None:
        self.heads, kv_heads, head_dim, hidden, size, has_bias = SIZES[model]
        self._is_gated = product == GATE_UP
        self.configs = GATED if self._is_gated else ROTATED[model]
        outputs = 2 * size if self._is_gated else (self.heads + 2 * kv_heads) * head_dim

        self.weights = weights_of(outputs, hidden, num_weights)
        self.x, self.bias = randn(rows, hidden), randn(outputs) if has_bias and not self._is_gated else None
        at = torch.arange(rows, device=DEVICE)
        angles = torch.rand(1024, head_dim // 2, device=DEVICE) * 6.3
        self.tables, self.positions, self.slots = (angles.cos(), angles.sin()), at * 7 % 1024, PAGE * (1 + at)
        self.caches = randn(2 + rows, kv_heads, PAGE, head_dim), randn(2 + rows, kv_heads, PAGE, head_dim)

    def product(self, index: int) -> Tensor:
        return F.linear(self.x, self.weights[index], self.bias)

    def plain(self, index: int) -> Tensor:
        if self._is_gated:
            return silu_and_mul(self.product(index))
        return rope_and_store(self.product(index), *self.tables, self.positions, self.slots, *self.caches, self.heads)

    def paired(self, config: PairConfig, index: int) -> Tensor:
        if self._is_gated:
            return gated_linear(self.x, self.weights[index], self.bias, config)
        places = self.tables, self.positions, self.slots, self.caches
        return rotated_linear(self.x, self.weights[index], self.bias, *places, self.heads, config)


class InvariantProduct:
    """A product of deterministic mode and what follows: SiLU after ``gate_up``, the norm after ``o`` and ``down``."""

    def __init__(self, product: str, rows: int, num_weights: int | None = None) -> None:
        self.product = product
        outputs, inputs = PRODUCTS[product]
        self.weights = weights_of(outputs, inputs, num_weights)
        self.x, self.norm_weight = randn(rows, inputs), randn(HIDDEN)
        # Zeros: a call adds its product to them, and the result must not depend on the calls before.
        self.residual = torch.zeros(rows, HIDDEN, device=DEVICE)
        self.configs = MATMULS

    def present(self, index: int) -> Tensor:
        weight = self.weights[index]
        if self.product == "gate_up":
            return silu_and_mul(invariant_linear(self.x, weight))
        if self.product in ("o", "down"):
            product = invariant_linear(self.x, weight, None, torch.float32)
            return add_rms_norm(product, self.residual.zero_(), self.norm_weight, EPS)
        return invariant_linear(self.x, weight, None, self._out_dtype)

    def scaled(self, config: MatmulConfig | None, index: int) -> Tensor:
        """With ``config``, or with the tiles that ``linear.SCALED_TILES`` selects."""
        with tiles(scaled=True):
            weight = self.weights[index]
            if self.product == "gate_up":
                chosen = config or linear.invariant_config(self.x, len(weight))
                return gated_linear(self.x, weight, None, PairConfig.of(chosen))
            if self.product in ("o", "down"):
                parts = invariant_parts(self.x, weight, config)
                return sum_add_rms_norm(parts, None, self.residual.zero_(), self.norm_weight, EPS)
            return invariant_linear(self.x, weight, None, self._out_dtype, config)

    @property
    def _out_dtype(self) -> torch.dtype:
        return torch.float32 if self.product == "lm_head" else DTYPE


@contextmanager
def tiles(*, scaled: bool, keys: int = 64, dependent: bool = False) -> Iterator[None]:
    """The kernels with these switches. Graphs keep what they were captured with."""
    switches = ((linear, "SCALED_TILES", scaled), (prefill_attention, "KEYS_PER_BLOCK", keys),
                (cuda_attention, "DEPENDENT_LAUNCH", dependent))  # fmt: skip
    before = [getattr(module, name) for module, name, _ in switches]
    for module, name, value in switches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(switches, before, strict=True):
            setattr(module, name, value)


def invariant_attention(rows: int, config: PrefillConfig) -> Callable[[int], Tensor]:
    """Decoding with one query per row, over four caches in turn."""
    heads, kv_heads, head_dim = SIZES[MODEL][:3]
    lengths = [CONTEXT - row % PAGE for row in range(rows)]
    sets = [Pages(lengths, kv_heads, head_dim) for _ in range(4)]
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    places = torch.stack([starts[:-1], torch.zeros_like(starts[:-1])], dim=1)
    q = randn(rows, heads, head_dim)

    def call(index: int) -> Tensor:
        pages = sets[index]
        cache = pages.keys, pages.values, pages.table, places, starts, pages.contexts
        return prefill_attention.paged_prefill_attention(q, *cache, SCALE, config=config)

    return call


@cache
def decoder_of(deterministic: bool) -> tuple[FusedDecoder, ModelSpec]:
    model = build_model(MODEL, DEVICE, DTYPE)
    spec = ModelSpec.of(model)
    return FusedDecoder(model, spec, InvariantCudaOps() if deterministic else CudaOps()), spec


def layer(
    rows: int,
    *,
    pairs: PairedProducts | None = None,
    deterministic: bool = False,
    scaled: bool = False,
    keys: int = 64,
    dependent: bool = False,
) -> tuple[float, Tensor]:
    """Microseconds of a layer, all layers in one graph, and the last hidden states."""
    decoder, spec = decoder_of(deterministic)
    torch.manual_seed(0)
    pages = Pages([CONTEXT - row % PAGE for row in range(rows)], 1, 1)  # for its table
    kv_cache = KVCache(spec, len(pages.keys), PAGE)
    for each in (each for index in range(spec.num_layers) for each in kv_cache.layer(index)):
        each.normal_()
    positions = pages.contexts.long() - 1
    slots = pages.table.long().gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE
    ids = torch.randint(0, spec.vocab_size, (rows,), device=DEVICE)
    kind = CudaPrefill.of_rows if deterministic else CudaDecode
    attention = kind(kv_cache, pages.table, pages.contexts)
    decoder.pairs = InvariantPairs() if deterministic and scaled else pairs
    with tiles(scaled=scaled, keys=keys, dependent=dependent):
        us = time_of(lambda _: decoder(ids, positions, slots, attention, kv_cache), 1, calls=1)
        hidden = decoder(ids, positions, slots, attention, kv_cache)
    return us / spec.num_layers, hidden
