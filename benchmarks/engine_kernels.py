"""Check and time the engine's kernels on a CUDA device.

    PYTHONPATH=src python benchmarks/engine_kernels.py --only check layer --out kernels.json

Times are microseconds per call inside a replayed CUDA graph. Where a kernel reads weights, a cache or logits, every
call of the graph reads others, so that the second-level cache does not stand in for memory. The exit status is 1 if
anything raised, was not the same to the bit where it must be, or was further than ``MAX_ERROR`` from its reference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
from shapes import build_model
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.attention.cuda import CudaDecode
from headwater.engine.cuda_ops import CudaOps
from headwater.engine.fused_decoder import FusedDecoder
from headwater.engine.kernels import prefill_attention
from headwater.engine.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headwater.engine.kernels.advance import advance
from headwater.engine.kernels.decode_attention import DecodeConfig, paged_decode_attention, suggest_num_splits
from headwater.engine.kernels.matmul import invariant_linear
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.prefill_attention import PrefillConfig, build_tiles, paged_prefill_attention
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.sampling import sample_tokens
from headwater.engine.kernels.split_linear import possible_slices, split_linear, suggest_slices
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec
from headwater.engine.rows import Rows
from headwater.engine.sampler import uniforms

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
MODEL = "qwen2.5-1.5b"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 12, 2, 128, 1536, 8960, 151936
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
PRODUCTS = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE), "lm_head": (VOCABULARY, HIDDEN)}  # fmt: skip
"""Outputs and inputs of each product."""
PAGE, SCALE, EPS = 64, 0.09, 1e-6
ROWS, CONTEXT = (8, 64, 256, 1024), 384
CALLS, COLD_BYTES = 28, 500e6
MAX_ERROR = 0.02
"""Relative to the largest value: a few roundings of bfloat16."""

Values = dict[str, object]
Cases = Iterator[tuple[str, Callable[[], Values]]]


class Report:
    """Runs cases until the time is up, prints their results as they come, and keeps them for the file."""

    def __init__(self, seconds: float) -> None:
        self.results: list[Values] = []
        self.num_failed = 0
        self.ends = time.monotonic() + seconds

    def run(self, section: str, name: str, work: Callable[[], Values]) -> None:
        failed = False
        if time.monotonic() > self.ends:
            values: Values = {"skipped": "out of time"}
        else:
            try:
                values = work()
                failed = any(_is_wrong(key, value) for key, value in values.items())
            except Exception:  # noqa: BLE001 - one bad kernel or config must not cost the rest of the run
                values, failed = {"raised": traceback.format_exc(limit=-4)}, True
        self.num_failed += failed
        self.results.append({"section": section, "name": name, "failed": failed, **values})
        shown = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()]
        print(f"{section:8s} {name:42s}", *["FAILED"] * failed, *shown, flush=True)


def _is_wrong(key: str, value: object) -> bool:
    # "Not below" rather than "above", so that NaN is wrong.
    return value is False or (key.endswith("error") and isinstance(value, float) and not value < MAX_ERROR)


def microseconds(call: Callable[[int], object], num_sets: int, calls: int = CALLS) -> float:
    """Median time of a call over replays of a graph of ``calls`` calls, which rotate through ``num_sets`` inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)  # compiles kernels, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            call(index % num_sets)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


def num_sets_for(num_bytes: float) -> int:
    """How many inputs of this size exceed the second-level cache several times."""
    return max(2, min(CALLS, math.ceil(COLD_BYTES / num_bytes)))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def randn(*shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype or DTYPE).mul_(scale)


class Pages:
    """A paged cache of rows with the given lengths, on shuffled pages.

    Each group of 16 consecutive rows shares its first ``shared`` pages, as the samples of a prompt do.
    """

    def __init__(
        self, lengths: Sequence[int], kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM,
        dtype: torch.dtype | None = None, shared: int = 0,
    ) -> None:  # fmt: skip
        per_row = -(-max(lengths) // PAGE)
        ids = 1 + torch.randperm(len(lengths) * per_row).view(len(lengths), per_row)
        ids[:, :shared] = ids[torch.arange(len(lengths)) // 16 * 16, :shared]
        # A multiple of 16 keeps one compiled variant for all context lengths.
        self.table = F.pad(ids, (0, -per_row % 16)).to(DEVICE, torch.int32)
        self.keys, self.values = (randn(1 + ids.numel(), kv_heads, PAGE, head_dim, dtype=dtype) for _ in range(2))
        self.lengths = lengths
        self.contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def attend(self, row: int, q: Tensor) -> Tensor:
        """Causal float64 attention of the last ``len(q)`` positions of a row."""
        length, group = self.lengths[row], q.shape[1] // self.keys.shape[1]
        tokens = (each[self.table[row].long()].transpose(1, 2).flatten(0, 1) for each in (self.keys, self.values))
        keys, values = (each[:length].double().repeat_interleave(group, 1) for each in tokens)
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * SCALE
        hidden = torch.ones(len(q), length, dtype=torch.bool, device=q.device).triu(1 + length - len(q))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    def decode(self, q: Tensor, splits: int, config: DecodeConfig | None = None) -> Tensor:
        cache = self.keys, self.values, self.table, self.contexts
        return paged_decode_attention(q, *cache, SCALE, num_splits=splits, config=config)


class Chunks:
    """Chunks of (row of the pages, queries, context), packed for prefill."""

    def __init__(self, chunks: Sequence[tuple[int, int, int]], heads: int, kv_heads: int, config: PrefillConfig):
        rows, lengths, contexts = zip(*chunks, strict=True)
        tiles = build_tiles(lengths, prefill_attention.queries_per_tile(heads, kv_heads, config))
        starts = [sum(lengths[:chunk]) for chunk in range(len(lengths) + 1)]
        self.rows, self.config = list(rows), config
        self.shape = [torch.as_tensor(x, dtype=torch.int32, device=DEVICE) for x in (tiles, starts, contexts)]

    def attend(self, q: Tensor, pages: Pages, table: Tensor) -> Tensor:
        return paged_prefill_attention(q, pages.keys, pages.values, table, *self.shape, SCALE, config=self.config)


def advance_rows(rows: Rows) -> None:
    names = ("last_tokens", "positions", "context_lens", "num_generated", "max_new", "min_new", "stop_ids", "alive",
             "slots", "page_table", "out_tokens", "out_logprobs")  # fmt: skip
    state = {name: getattr(rows, name) for name in names}
    tokens = torch.arange(rows.capacity, device=DEVICE)
    advance(tokens, -tokens.float(), step_index=rows.step, page_tokens=PAGE, **state)


def living_rows(num_rows: int) -> Rows:
    rows = Rows(num_rows, 16, 64, DEVICE)
    rows.alive.fill_(True)
    rows.max_new.fill_(1 << 30)
    return rows


# Correctness


def check() -> Cases:
    yield "norms and activations", check_elementwise
    yield "advance", check_advance
    for norms in (False, True):
        yield f"rope_and_store norms={norms}", partial(check_rope, norms)
    for dtype, heads, kv_heads, head_dim in ((DTYPE, 12, 2, 128), (DTYPE, 9, 3, 64), (torch.float32, 12, 2, 128)):
        label = f"{str(dtype)[6:]} head_dim={head_dim}"
        for splits in (1, 4):
            yield f"decode {label} splits={splits}", partial(check_decode, dtype, heads, kv_heads, head_dim, splits)
        yield f"prefill {label}", partial(check_prefill, dtype, heads, kv_heads, head_dim)
    for dtype in (DTYPE, torch.float32):
        yield f"sampler {str(dtype)[6:]}", partial(check_sampler, dtype)
    yield "invariant_linear", check_invariant_linear
    for product in ("o", "down"):
        for slices in possible_slices(PRODUCTS[product][1])[1:]:
            yield f"split_linear {product} slices={slices}", partial(check_split_linear, product, slices)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def check_elementwise() -> Values:
    x, residual, weight, gate_up = randn(64, HIDDEN), randn(64, HIDDEN), randn(HIDDEN), randn(64, 2 * INTERMEDIATE)
    total, (gate, up) = x + residual, gate_up.double().chunk(2, -1)
    return {
        "rms_norm_error": relative_error(rms_norm(x, weight, EPS), norm(x, weight)),
        "add_rms_norm_error": relative_error(add_rms_norm(x, residual, weight, EPS), norm(total, weight)),
        "residual_same_bits": torch.equal(total, residual),
        "silu_error": relative_error(silu_and_mul(gate_up), F.silu(gate) * up),
        "gelu_error": relative_error(gelu_tanh_and_mul(gate_up), F.gelu(gate, approximate="tanh") * up),
    }


def check_advance() -> Values:
    """Four rows: one goes on, one meets its stop token, one its length, and one had ended before."""
    rows = living_rows(4)
    rows.stop_ids[1, 0], rows.max_new[2], rows.alive[3] = 1, 1, False
    rows.page_table.fill_(3)
    advance_rows(rows)
    return {
        "alive_right": rows.alive.tolist() == [True, False, False, False],
        "next_slot_right": rows.slots.tolist() == [3 * PAGE + 1, 0, 0, 0],
        "record_right": rows.out_tokens[0].tolist() == [0, 1, 2, -1] and rows.step.item() == 1,
    }


def check_rope(norms: bool) -> Values:
    pages, qkv = Pages([PAGE] * 8), randn(64, QKV)
    angles = torch.rand(640, HEAD_DIM // 2, device=DEVICE).repeat(1, 2) * 6.3
    positions, slots = torch.randint(640, (64,), device=DEVICE), PAGE + torch.randperm(8 * PAGE, device=DEVICE)[:64]
    weights = (randn(HEAD_DIM), randn(HEAD_DIM)) if norms else (None, None)
    tables = angles.cos(), angles.sin()
    query = rope_and_store(qkv, *tables, positions, slots, pages.keys, pages.values, HEADS, *weights, EPS)
    stored_key, stored_value = (each[slots // PAGE, :, slots % PAGE] for each in (pages.keys, pages.values))
    *heads, value = qkv.view(64, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = (each[positions].double()[:, None] for each in tables)
    errors = []
    for actual, head, weight in zip((query, stored_key), heads, weights, strict=True):
        wide = head.double() if weight is None else norm(head, weight)
        low, high = wide.chunk(2, -1)
        errors.append(relative_error(actual, wide * cos + torch.cat([-high, low], -1) * sin))
    return {"query_error": errors[0], "key_error": errors[1], "value_same_bits": torch.equal(stored_value, value)}


def check_decode(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, splits: int) -> Values:
    pages = Pages([0, 1, 63, 64, 65, 384, 640, 2500], kv_heads, head_dim, dtype)
    q = randn(len(pages.lengths), heads, head_dim, dtype=dtype)
    actual = pages.decode(q, splits)
    expected = torch.cat([pages.attend(row, q[row : row + 1]) for row in range(1, len(q))])
    return {"relative_error": relative_error(actual[1:], expected), "empty_row_is_zero": not bool(actual[0].any())}


def check_prefill(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Values:
    pages = Pages([300, 77], kv_heads, head_dim, dtype)
    q = randn(377, heads, head_dim, dtype=dtype)
    config = prefill_attention.default_config(head_dim, q.element_size())

    def attend(*chunks: tuple[int, int, int]) -> Tensor:
        packed = Chunks(chunks, heads, kv_heads, config)
        return packed.attend(q, pages, pages.table[packed.rows])[:300]

    whole = Chunks([(0, 300, 300), (1, 77, 77)], heads, kv_heads, config).attend(q, pages, pages.table)
    return {
        "relative_error": relative_error(whole, torch.cat([pages.attend(0, q[:300]), pages.attend(1, q[300:])])),
        "chunks_same_bits": torch.equal(whole[:300], attend((0, 100, 100), (0, 1, 101), (0, 199, 300))),
        "single_same_bits": torch.equal(whole[:300], attend(*((0, 1, context) for context in range(1, 301)))),
    }


def check_sampler(dtype: torch.dtype) -> Values:
    logits = randn(512, VOCABULARY, dtype=dtype, scale=3.0)
    logits[:, 1000:3000] = -torch.inf
    keys, positions = torch.randint(-(2**62), 2**62, (512,), device=DEVICE), torch.arange(512, device=DEVICE)
    temperature = torch.full((512,), 0.8, device=DEVICE)
    temperature[::4] = 0.0
    inputs = logits, keys, positions, temperature
    tokens, logprobs = sample_tokens(*inputs)
    reference = (logits.double() / torch.where(temperature == 0, 1.0, temperature)[:, None].double()).log_softmax(-1)
    cumulative = reference.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms(keys, positions)[:, None] * cumulative[:, -1:], right=True)[:, 0]
    same = tokens == torch.where(temperature == 0, logits.argmax(-1), drawn)
    alone = [sample_tokens(*(each[row : row + 1] for each in inputs)) for row in range(8)]
    return {
        # Float32 sums may cross a uniform a token earlier or later than float64 ones; greedy rows have no excuse.
        "drawn_otherwise_error": 1.0 - float(same.double().mean()),
        "greedy_same": bool(same[::4].all()),
        "logprob_error": float((logprobs - reference.gather(-1, tokens[:, None])[:, 0]).abs().max()),
        "alone_same_bits": [(int(token), float(logprob)) for token, logprob in alone]
        == list(zip(tokens[:8].tolist(), logprobs[:8].tolist(), strict=True)),
    }


def check_invariant_linear() -> Values:
    x, weight, bias = randn(1000, HIDDEN), randn(QKV, HIDDEN, scale=0.03), randn(QKV)
    whole = invariant_linear(x, weight, bias)
    fewer = [invariant_linear(x[:rows], weight, bias) for rows in (1, 8, 64, 65, 256)]
    error = relative_error(whole, F.linear(x.double(), weight.double(), bias.double()))
    return {"relative_error": error, "same_bits": all(torch.equal(whole[: len(each)], each) for each in fewer)}


def check_split_linear(product: str, slices: int) -> Values:
    outputs, inputs = PRODUCTS[product]
    x, weight, bias = randn(256, inputs), randn(outputs, inputs, scale=0.03), randn(outputs)
    residual, norm_weight = randn(256, outputs), randn(outputs)
    exact = residual.double() + F.linear(x.double(), weight.double(), bias.double())
    normed = sum_add_rms_norm(split_linear(x, weight, slices), bias, residual, norm_weight, EPS)
    return {
        "residual_error": relative_error(residual, exact),
        "norm_error": relative_error(normed, norm(exact, norm_weight)),
    }


# Times


def layer() -> Cases:
    """Decode steps of the engine's decoder, all layers in one graph."""
    model = build_model(MODEL, DEVICE, DTYPE)
    spec = ModelSpec.of(model)
    decoder = FusedDecoder(model, spec, CudaOps())
    for rows in ROWS:
        yield f"rows={rows} context={CONTEXT}", partial(time_layer, decoder, spec, rows)


def time_layer(decoder: FusedDecoder, spec: ModelSpec, rows: int) -> Values:
    pages = Pages([CONTEXT - row % PAGE for row in range(rows)], 1, 1)
    cache = KVCache(spec, len(pages.keys), PAGE)
    for each in (each for index in range(spec.num_layers) for each in cache.layer(index)):
        each.normal_()
    positions = pages.contexts.long() - 1
    slots = pages.table.long().gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE
    ids = torch.randint(0, spec.vocab_size, (rows,), device=DEVICE)
    attention = CudaDecode(cache, pages.table, pages.contexts)
    us = microseconds(lambda _: decoder(ids, positions, slots, attention, cache), 1, calls=1)
    return {"us_per_layer": us / spec.num_layers, f"ms_per_{spec.num_layers}_layers": us / 1e3}


def decode() -> Cases:
    default = DecodeConfig(32, 4, 4)
    for rows in ROWS:
        suggested = suggest_num_splits(rows, KV_HEADS, 1024)
        for splits in sorted({1, 2, 4, suggested}) if rows < 256 else (suggested, 2):
            mark = " (suggested)" * (splits == suggested)
            yield f"rows={rows} splits={splits}{mark}", partial(time_decode, rows, CONTEXT, splits, default)
    for config in (DecodeConfig(32, 4, 3), DecodeConfig(32, 2, 4), DecodeConfig(16, 2, 6), DecodeConfig(64, 4, 3)):
        label = f"keys={config.block_n} warps={config.num_warps} stages={config.num_stages}"
        yield f"rows=256 {label}", partial(time_decode, 256, CONTEXT, 1, config)
    for rows in (256, 1024):
        yield f"rows={rows} context=640", partial(time_decode, rows, 640, 1, default)
        for shared in (2, 4):
            name = f"rows={rows} {shared * PAGE} tokens shared by 16"
            yield name, partial(time_decode, rows, CONTEXT, 1, default, shared)


def time_decode(rows: int, context: int, splits: int, config: DecodeConfig, shared: int = 0) -> Values:
    lengths = [context - row % PAGE for row in range(rows)]
    num_bytes = 2 * sum(lengths) * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    sets = [Pages(lengths, shared=shared) for _ in range(num_sets_for(num_bytes))]
    q = randn(rows, HEADS, HEAD_DIM)
    us = microseconds(lambda index: sets[index].decode(q, splits, config), len(sets))
    return {"us": us, "tb_s": num_bytes / us / 1e6}


def weights_of(product: str) -> list[Tensor]:
    outputs, inputs = PRODUCTS[product]
    return [randn(outputs, inputs, scale=0.03) for _ in range(num_sets_for(outputs * inputs * DTYPE.itemsize))]


def split() -> Cases:
    for product in ("down", "o"):
        for rows in (8, 64, 128, 256, 512, 1024):
            yield f"{product} and norm rows={rows}", partial(time_split, product, rows)


def time_split(product: str, rows: int) -> Values:
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


def gemm() -> Cases:
    for product in PRODUCTS:
        for rows in ROWS:
            for how, linear in (("cublas", F.linear), ("invariant", invariant_linear)):
                yield f"{product} rows={rows} {how}", partial(time_gemm, product, rows, linear)


def time_gemm(product: str, rows: int, linear: Callable[[Tensor, Tensor], Tensor]) -> Values:
    (outputs, inputs), weights, x = PRODUCTS[product], weights_of(product), randn(rows, PRODUCTS[product][1])
    us = microseconds(lambda index: linear(x, weights[index]), len(weights), 6 if product == "lm_head" else CALLS)
    num_bytes = DTYPE.itemsize * (outputs * inputs + rows * (inputs + outputs))
    return {"us": us, "tb_s": num_bytes / us / 1e6, "tflop_s": 2.0 * rows * inputs * outputs / us / 1e6}


def sampler() -> Cases:
    for rows in ROWS:
        for chunk in (4096, 8192):
            yield f"rows={rows} chunk={chunk}", partial(time_sampler, rows, chunk)


def time_sampler(rows: int, chunk: int) -> Values:
    num_bytes = rows * VOCABULARY * DTYPE.itemsize
    sets = [randn(rows, VOCABULARY) for _ in range(num_sets_for(num_bytes))]
    keys, temperature = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
    us = microseconds(lambda index: sample_tokens(sets[index], keys, keys, temperature, chunk=chunk), len(sets))
    return {"us": us, "tb_s": num_bytes / us / 1e6}


def small() -> Cases:
    """Kernels between products; their inputs are in the second-level cache, as in a step they mostly are."""
    for rows in ROWS:
        x, residual, weight, parts = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN), randn(4, rows, HIDDEN)
        gate_up, qkv, pages, living = randn(rows, 2 * INTERMEDIATE), randn(rows, QKV), Pages([PAGE] * rows), living_rows(rows)
        tables, at = randn(2, 1024, HEAD_DIM, dtype=torch.float32), torch.arange(rows, device=DEVICE)
        calls: dict[str, Callable[[], object]] = {
            "rms_norm": partial(rms_norm, x, weight, EPS),
            "add_rms_norm": partial(add_rms_norm, x, residual, weight, EPS),
            "sum_add_rms_norm of 4": partial(sum_add_rms_norm, parts.float(), None, residual, weight, EPS),
            "silu_and_mul": partial(silu_and_mul, gate_up),
            "rope_and_store": partial(
                rope_and_store, qkv, *tables, at % 640, PAGE * (1 + at), pages.keys, pages.values, HEADS
            ),
            "advance": partial(advance_rows, living),
        }
        for name, call in calls.items():
            yield f"{name} rows={rows}", lambda call=call: {"us": microseconds(lambda _: call(), 1)}


def prefill() -> Cases:
    configs = PrefillConfig(64, 64, 4, 3), PrefillConfig(128, 64, 8, 3), PrefillConfig(64, 32, 4, 3)
    for chunks, length in ((64, 128), (16, 1024)):
        for config in configs:
            label = f"m={config.block_m} n={config.block_n} warps={config.num_warps} stages={config.num_stages}"
            yield f"{chunks} x {length} {label}", partial(time_prefill, chunks, length, config)


def time_prefill(chunks: int, length: int, config: PrefillConfig) -> Values:
    sets, q = [Pages([length] * chunks) for _ in range(4)], randn(chunks * length, HEADS, HEAD_DIM)
    packed = Chunks([(row, length, length) for row in range(chunks)], HEADS, KV_HEADS, config)
    us = microseconds(lambda index: packed.attend(q, sets[index], sets[index].table), len(sets))
    return {"us": us, "tflop_s": 2.0 * chunks * HEADS * HEAD_DIM * length * (length + 1) / us / 1e6}


SECTIONS: dict[str, Callable[[], Cases]] = {
    each.__name__: each for each in (check, layer, split, decode, small, sampler, gemm, prefill)
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all results to this JSON file")
    parser.add_argument("--seconds", type=float, default=300.0, help="start nothing new after this long")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    report = Report(arguments.seconds)
    try:
        for section in arguments.only:
            for name, work in SECTIONS[section]():
                report.run(section, name, work)
                torch.cuda.empty_cache()
    finally:
        if arguments.out:
            arguments.out.write_text(json.dumps(report.results, indent=1) + "\n")
    sys.exit(1 if report.num_failed else 0)


if __name__ == "__main__":
    main()
