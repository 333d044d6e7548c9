"""How long each kernel, each product and the whole decoder take, in microseconds per call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from kernel_parts import (
    CALLS,
    CONTEXT,
    DEVICE,
    DTYPE,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    MODEL,
    PAGE,
    PRODUCTS,
    QKV,
    VOCABULARY,
    Pages,
    Values,
    cold,
    microseconds,
    randn,
)
from shapes import build_model
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.attention.cuda import CudaDecode
from headwater.engine.kernels import prefill_attention
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.advance import advance
from headwater.engine.kernels.decode_attention import DecodeConfig, suggest_num_splits
from headwater.engine.kernels.linear import invariant_linear, possible_slices, split_linear, suggest_slices
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.sampling import sample_tokens
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec
from headwater.engine.rows import DecodeRows
from headwater.engine.runners.cuda import CudaOps
from headwater.engine.runners.decoder import FusedDecoder


@cache
def fused_decoder() -> tuple[FusedDecoder, ModelSpec]:
    model = build_model(MODEL, DEVICE, DTYPE)
    spec = ModelSpec.of(model)
    return FusedDecoder(model, spec, CudaOps()), spec


def layer(rows: int) -> Values:
    """The whole decoder, all layers in one graph."""
    decoder, spec = fused_decoder()
    torch.manual_seed(0)
    pages = Pages([CONTEXT - row % PAGE for row in range(rows)], 1, 1)  # for its table
    kv_cache = KVCache(spec, len(pages.keys), PAGE)
    for each in (each for index in range(spec.num_layers) for each in kv_cache.layer(index)):
        each.normal_()
    positions = pages.contexts.long() - 1
    slots = pages.table.long().gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE
    ids = torch.randint(0, spec.vocab_size, (rows,), device=DEVICE)
    attention = CudaDecode(kv_cache, pages.table, pages.contexts)
    us = microseconds(lambda _: decoder(ids, positions, slots, attention, kv_cache), 1, calls=1)
    return {"context": CONTEXT, "us": us / spec.num_layers, f"ms_{spec.num_layers}_layers": us / 1e3}


def decode(
    rows: int, splits: int = 1, config: Sequence[int] = (32, 4, 4), context: int = CONTEXT, shared: int = 0
) -> Values:
    """``config`` is keys per tile, warps and stages; ``shared`` counts the pages that 16 samples of a prompt share."""
    lengths = [context - row % PAGE for row in range(rows)]
    num_bytes = 2 * sum(lengths) * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    sets, q = cold(lambda: Pages(lengths, shared=shared), num_bytes), randn(rows, HEADS, HEAD_DIM)
    us = microseconds(lambda index: sets[index].decode(q, splits, DecodeConfig(*config)), len(sets))
    return {"us": us, "tb_s": num_bytes / us / 1e6, "suggested_splits": suggest_num_splits(rows, KV_HEADS, 1024)}


def weights_of(product: str) -> list[Tensor]:
    return cold(lambda: randn(*PRODUCTS[product], scale=0.03), math.prod(PRODUCTS[product]) * DTYPE.itemsize)


def split(product: str, rows: int) -> Values:
    """A product and the norm after it, by cuBLAS (one slice) and in every possible number of slices."""
    (outputs, inputs), weights = PRODUCTS[product], weights_of(product)
    x, residual, norm_weight = randn(rows, inputs), randn(rows, outputs), randn(outputs)

    def call(slices: int, index: int) -> Tensor:
        if slices == 1:
            return add_rms_norm(F.linear(x, weights[index]), residual, norm_weight, EPS)
        return sum_add_rms_norm(split_linear(x, weights[index], slices), None, residual, norm_weight, EPS)

    times = {slices: microseconds(partial(call, slices), len(weights)) for slices in possible_slices(inputs)}
    best, suggested = min(times, key=times.__getitem__), suggest_slices(rows, outputs, inputs)
    comparison: Values = {"best": best, "suggested": suggested, "suggested_over_best": times[suggested] / times[best]}
    return comparison | {"us_cublas" if slices == 1 else f"us_{slices}": us for slices, us in times.items()}


def gemm(product: str, rows: int) -> Values:
    (outputs, inputs), weights, x = PRODUCTS[product], weights_of(product), randn(rows, PRODUCTS[product][1])
    values = {}
    for name, linear in (("cublas", F.linear), ("invariant", invariant_linear)):
        calls = 6 if product == "lm_head" else CALLS
        us = microseconds(lambda index, linear=linear: linear(x, weights[index]), len(weights), calls)
        tb_s = DTYPE.itemsize * (outputs * inputs + rows * (inputs + outputs)) / us / 1e6
        values |= {f"us_{name}": us, f"tb_s_{name}": tb_s, f"tflop_s_{name}": 2 * rows * inputs * outputs / us / 1e6}
    return values


def sampler(rows: int, chunk: int) -> Values:
    num_bytes = rows * VOCABULARY * DTYPE.itemsize
    sets = cold(lambda: randn(rows, VOCABULARY), num_bytes)
    keys, temperature = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
    us = microseconds(lambda index: sample_tokens(sets[index], keys, keys, temperature, chunk=chunk), len(sets))
    return {"us": us, "tb_s": num_bytes / us / 1e6}


def small(rows: int) -> Values:
    """The kernels between matrix products, in microseconds. As in a real step, their inputs are in the L2 cache."""
    x, residual, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)
    parts, gate_up = randn(4, rows, HIDDEN, dtype=torch.float32), randn(rows, 2 * INTERMEDIATE)
    qkv, pages, tables = randn(rows, QKV), Pages([PAGE] * rows), randn(2, 1024, HEAD_DIM, dtype=torch.float32)
    at, logprobs = torch.arange(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
    rope = *tables, at % 640, PAGE * (1 + at), pages.keys, pages.values, HEADS
    state = DecodeRows(rows, 16, 64, DEVICE)
    state.alive.fill_(True)
    state.max_new.fill_(1 << 30)
    names = ("last_tokens", "positions", "context_lens", "num_generated", "max_new", "min_new", "stop_ids", "alive",
             "slots", "page_table", "out_tokens", "out_logprobs")  # fmt: skip
    columns = {name: getattr(state, name) for name in names}
    calls: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: rms_norm(x, weight, EPS),
        "add_rms_norm": lambda: add_rms_norm(x, residual, weight, EPS),
        "sum_4_add_rms_norm": lambda: sum_add_rms_norm(parts, None, residual, weight, EPS),
        "silu_and_mul": lambda: silu_and_mul(gate_up),
        "rope_and_store": lambda: rope_and_store(qkv, *rope),
        "advance": lambda: advance(at, logprobs, step_index=state.step, page_tokens=PAGE, **columns),
    }
    return {name: microseconds(lambda _, call=call: call(), 1) for name, call in calls.items()}


def prefill(prompts: tuple[int, int], config: Sequence[int]) -> Values:
    """``prompts`` is their number and length; ``config`` is rows and keys per tile, warps and stages."""
    num, length = prompts
    q, whole = randn(num * length, HEADS, HEAD_DIM), [(row, length, length) for row in range(num)]
    sets = [Pages([length] * num).prefill(q, whole, prefill_attention.PrefillConfig(*config)) for _ in range(4)]
    us = microseconds(lambda index: sets[index](), len(sets))
    return {"us": us, "tflop_s": 2 * num * HEADS * HEAD_DIM * length * (length + 1) / us / 1e6}
