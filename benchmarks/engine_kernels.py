"""Check and time the engine's Triton kernels on a CUDA device.

    PYTHONPATH=src python benchmarks/engine_kernels.py --out kernels.json

Times are microseconds per call inside a replayed CUDA graph. Every call of a graph reads other weights or another
cache, so that the second-level cache does not stand in for memory. The section ``layer`` times the decoder itself, all
layers of a random model in one graph, and gives the time per layer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.attention.cuda import CudaDecode
from headwater.engine.cuda_ops import CudaOps, InvariantCudaOps
from headwater.engine.fused_decoder import FusedDecoder
from headwater.engine.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headwater.engine.kernels.advance import MAX_STOP_IDS, advance
from headwater.engine.kernels.decode_attention import (
    DecodeConfig,
    RotaryInputs,
    paged_decode_attention,
    rotary_decode_attention,
    split_counters,
)
from headwater.engine.kernels.matmul import invariant_linear
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.prefill_attention import (
    PrefillConfig,
    build_tiles,
    default_config,
    paged_prefill_attention,
    queries_per_tile,
)
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.sampling import sample_tokens
from headwater.engine.kernels.split_linear import possible_slices, split_linear, suggest_slices
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
PAGE = 64
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 12, 2, 128, 1536, 8960, 151936
CALLS = 28
COLD_BYTES = 500e6
ROWS = (8, 64, 256, 1024)


class Report:
    """Prints results as they come, and keeps them for the file."""

    def __init__(self, seconds: float) -> None:
        self.results: list[dict[str, object]] = []
        self.ends = time.monotonic() + seconds

    def add(self, section: str, name: str, **values: object) -> None:
        self.results.append({"section": section, "name": name, **values})
        shown = "  ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                          for key, value in values.items())  # fmt: skip
        print(f"{section:10s} {name:44s} {shown}", flush=True)

    def time_is_up(self) -> bool:
        return time.monotonic() > self.ends

    def try_to(self, section: str, name: str, work: Callable[[], None]) -> None:
        """One bad kernel or config must not cost the rest of the run."""
        if self.time_is_up():
            print(f"{section:10s} {name:44s} skipped: out of time", flush=True)
            return
        try:
            work()
        except Exception:  # noqa: BLE001
            self.results.append({"section": section, "name": name, "error": traceback.format_exc(limit=4)})
            print(f"{section:10s} {name:44s} FAILED", flush=True)
            traceback.print_exc(limit=4)


def microseconds(call: Callable[[int], object], num_sets: int, calls: int = CALLS) -> float:
    """Median time of a call over replays of a graph of ``calls`` calls, which rotate through ``num_sets`` inputs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            call(index % num_sets)
    times = []
    for replay in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def sets_for(num_bytes: float) -> int:
    """How many inputs of this size exceed the second-level cache several times."""
    return max(2, min(CALLS, math.ceil(COLD_BYTES / num_bytes)))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=dtype).mul_(scale)


class Cache:
    """A paged cache of rows with the given lengths, on shuffled pages.

    Each group of ``group`` consecutive rows shares its first ``shared_pages`` pages, as the samples of a prompt do.
    """

    def __init__(
        self, lengths: Sequence[int], kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, dtype: torch.dtype = BF16,
        *, group: int = 1, shared_pages: int = 0,
    ) -> None:  # fmt: skip
        counts = [max(1, -(-length // PAGE)) for length in lengths]
        num_pages = 1 + sum(counts)
        self.k = randn(num_pages, kv_heads, PAGE, head_dim, dtype=dtype)
        self.v = randn(num_pages, kv_heads, PAGE, head_dim, dtype=dtype)
        ids = (1 + torch.randperm(num_pages - 1)).to(torch.int32)
        # A multiple of 16 keeps one compiled variant for all context lengths.
        table = torch.zeros(len(lengths), -(-max(counts) // 16) * 16, dtype=torch.int32)
        taken = 0
        for row, count in enumerate(counts):
            table[row, :count] = ids[taken : taken + count]
            taken += count
        for row in range(len(lengths)):
            table[row, :shared_pages] = table[row - row % group, :shared_pages]
        self.table = table.to(CUDA)
        self.lengths = list(lengths)
        self.contexts = torch.tensor(self.lengths, dtype=torch.int32, device=CUDA)
        last = (self.contexts.long() - 1).clamp(min=0)
        pages = self.table.long().gather(1, last[:, None] // PAGE)[:, 0]
        self.last_slots = torch.where(self.contexts > 0, pages * PAGE + last % PAGE, 0)

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        pages = self.table[row].long()
        keys, values = (cache[pages].transpose(1, 2).flatten(0, 1)[: self.lengths[row]] for cache in (self.k, self.v))
        return keys, values


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal float64 attention of the last ``len(q)`` positions."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    at = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
    hidden = torch.arange(len(keys), device=q.device)[None, :] > at
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


# Correctness


def check_decode(report: Report) -> None:
    for dtype, kv_heads, heads, head_dim in ((BF16, 2, 12, 128), (BF16, 3, 9, 64), (torch.float32, 2, 12, 128)):
        cache = Cache([0, 1, 63, 64, 65, 384, 640, 2500], kv_heads, head_dim, dtype)
        q = randn(len(cache.lengths), heads, head_dim, dtype=dtype)
        expected = torch.cat([attend(q[i : i + 1], *cache.row(i), 0.09) for i in range(1, len(q))])
        for splits in (1, 4):
            actual = paged_decode_attention(q, cache.k, cache.v, cache.table, cache.contexts, 0.09, num_splits=splits)
            assert not actual[0].any(), "a row without context must give zeros"
            name = f"decode {str(dtype)[6:]} d={head_dim} splits={splits}"
            report.add("check", name, relative_error=relative_error(actual[1:], expected))
        counters = split_counters(len(q), kv_heads, CUDA)
        for dependent in (False, True):
            torch.cuda.synchronize()
            counted = [
                paged_decode_attention(
                    q, cache.k, cache.v, cache.table, cache.contexts, 0.09,
                    num_splits=4, counters=counters, dependent=dependent,
                )
                for _ in range(20)
            ]  # fmt: skip
            report.add(
                "check",
                f"decode {str(dtype)[6:]} d={head_dim} counted dependent={dependent}",
                relative_error=relative_error(counted[0][1:], expected),
                repeatable=all(torch.equal(counted[0], each) for each in counted),
                counters_zero=not bool(counters.any()),
            )
        check_rotary_decode(report, cache, heads, dtype)


def check_rotary_decode(report: Report, cache: Cache, heads: int, dtype: torch.dtype) -> None:
    rows, kv_heads, head_dim = len(cache.lengths), cache.k.shape[1], cache.k.shape[3]
    weights = randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)
    # Compiling takes most of the time, so only the usual case is checked in all ways.
    usual = dtype == BF16 and head_dim == HEAD_DIM
    for norms in ((None, None), weights) if usual else (weights,):
        qkv = randn(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        angles = torch.rand(4096, head_dim // 2, device=CUDA) * 6.3
        positions, slots = (cache.contexts.long() - 1).clamp(min=0), cache.last_slots
        rotary = RotaryInputs(angles.cos(), angles.sin(), positions, slots, *norms, 1e-6)
        k, v = cache.k.clone(), cache.v.clone()
        query = rope_and_store(qkv, rotary.cos, rotary.sin, positions, slots, k, v, heads, *norms, 1e-6)
        for splits in (1, 5) if usual else (5,):
            expected = paged_decode_attention(query, k, v, cache.table, cache.contexts, 0.09, num_splits=splits)
            own_k, own_v = cache.k.clone(), cache.v.clone()
            counters = split_counters(rows, kv_heads, CUDA)
            torch.cuda.synchronize()
            actual = rotary_decode_attention(
                qkv, rotary, own_k, own_v, cache.table, cache.contexts, 0.09,
                num_heads=heads, num_splits=splits, counters=counters, dependent=True,
            )  # fmt: skip
            report.add(
                "check",
                f"rotary decode {str(dtype)[6:]} d={head_dim} norms={norms[0] is not None} splits={splits}",
                relative_error=relative_error(actual, expected),
                keys_error=relative_error(own_k[1:], k[1:]),
                values_same_bits=torch.equal(own_v[1:], v[1:]),
                scratch_untouched=torch.equal(own_k[0], cache.k[0]),
            )


def prefill(cache: Cache, q: Tensor, chunks: list[tuple[int, int, int]], config: PrefillConfig | None = None) -> Tensor:
    """Attend for chunks of (row, queries, context)."""
    used = config or default_config(q.shape[-1], q.element_size())
    lengths = [queries for _, queries, _ in chunks]
    tiles = torch.from_numpy(build_tiles(lengths, queries_per_tile(q.shape[1], cache.k.shape[1], used))).to(CUDA)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)
    contexts = torch.tensor([context for _, _, context in chunks], dtype=torch.int32, device=CUDA)
    table = cache.table[[row for row, _, _ in chunks]]
    return paged_prefill_attention(q, cache.k, cache.v, table, tiles, starts, contexts, 0.09, config=config)


def check_prefill(report: Report) -> None:
    for dtype, kv_heads, heads, head_dim in ((BF16, 2, 12, 128), (BF16, 3, 9, 64), (torch.float32, 2, 12, 128)):
        cache = Cache([300, 77], kv_heads, head_dim, dtype)
        q = randn(377, heads, head_dim, dtype=dtype)
        whole = prefill(cache, q, [(0, 300, 300), (1, 77, 77)])
        expected = torch.cat([attend(q[:300], *cache.row(0), 0.09), attend(q[300:], *cache.row(1), 0.09)])
        chunked = prefill(cache, q[:300], [(0, 100, 100), (0, 1, 101), (0, 199, 300)])
        single = prefill(cache, q[:300], [(0, 1, context) for context in range(1, 301)])
        report.add(
            "check",
            f"prefill {str(dtype)[6:]} d={head_dim}",
            relative_error=relative_error(whole, expected),
            chunked_same_bits=torch.equal(whole[:300], chunked),
            single_same_bits=torch.equal(whole[:300], single),
        )


def check_sampler(report: Report) -> None:
    from headwater.engine.sampler import uniforms

    rows = 512
    for dtype in (BF16, torch.float32):
        logits = randn(rows, VOCABULARY, dtype=dtype, scale=3.0)
        logits[:, 1000:3000] = -torch.inf
        keys = torch.randint(-(2**62), 2**62, (rows,), device=CUDA)
        positions = torch.arange(rows, device=CUDA)
        temperature = torch.full((rows,), 0.8, device=CUDA)
        temperature[::4] = 0.0
        tokens, logprobs = sample_tokens(logits, keys, positions, temperature)
        used = torch.where(temperature == 0, 1.0, temperature).double()
        reference = torch.log_softmax(logits.double() / used[:, None], dim=-1)
        cumulative = reference.exp().cumsum(-1)
        target = uniforms(keys, positions)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
        expected = torch.where(temperature == 0, logits.argmax(-1), drawn)
        alone = [sample_tokens(logits[i : i + 1], keys[i : i + 1], positions[i : i + 1], temperature[i : i + 1])
                 for i in range(8)]  # fmt: skip
        report.add(
            "check",
            f"sampler {str(dtype)[6:]}",
            tokens_equal=float((tokens == expected).double().mean()),
            logprob_error=float((logprobs - reference.gather(-1, tokens[:, None])[:, 0]).abs().max()),
            greedy_equal=bool((tokens == expected)[::4].all()),
            alone_same=all(
                int(t) == int(tokens[i]) and torch.equal(p[0], logprobs[i]) for i, (t, p) in enumerate(alone)
            ),
        )


def check_matmul(report: Report) -> None:
    x, weight, bias = randn(1000, HIDDEN), randn(2048, HIDDEN, scale=0.03), randn(2048)
    whole = invariant_linear(x, weight, bias)
    same = all(torch.equal(whole[:rows], invariant_linear(x[:rows], weight, bias)) for rows in (1, 8, 64, 65, 256))
    exact = F.linear(x.double(), weight.double(), bias.double())
    report.add("check", "invariant_linear", relative_error=relative_error(whole, exact), same_bits=same)
    for name in ("o", "down"):
        outputs, inputs = GEMMS[name]
        weight, bias, norm_weight = randn(outputs, inputs, scale=0.03), randn(outputs), randn(outputs)
        for rows in (1, 8, 256):
            x, residual = randn(rows, inputs), randn(rows, outputs)
            exact = F.linear(x.double(), weight.double(), bias.double())
            plain_residual = residual.clone()
            plain = add_rms_norm(F.linear(x, weight, bias), plain_residual, norm_weight, 1e-6)
            for slices in possible_slices(inputs)[1:]:
                torch.cuda.synchronize()
                parts = split_linear(x, weight, slices)
                total = residual.clone()
                y = sum_add_rms_norm(parts, bias, total, norm_weight, 1e-6, dependent=True)
                report.add(
                    "check",
                    f"split_linear {name} rows={rows} slices={slices}",
                    relative_error=relative_error(parts.double().sum(0) + bias.double(), exact),
                    residual_difference=relative_error(total, plain_residual),
                    norm_difference=relative_error(y, plain),
                )


def check_small(report: Report) -> None:
    x, residual, weight = randn(64, HIDDEN), randn(64, HIDDEN), randn(HIDDEN)

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    report.add("check", "rms_norm", relative_error=relative_error(rms_norm(x, weight, 1e-6), norm(x)))
    total = x + residual
    y = add_rms_norm(x, residual, weight, 1e-6)
    same = torch.equal(total, residual)
    report.add("check", "add_rms_norm", relative_error=relative_error(y, norm(total)), residual_same_bits=same)
    gate_up = randn(64, 2 * INTERMEDIATE)
    gate, up = gate_up.chunk(2, -1)
    report.add("check", "silu_and_mul", relative_error=relative_error(silu_and_mul(gate_up), F.silu(gate) * up))
    expected = F.gelu(gate, approximate="tanh") * up
    report.add("check", "gelu_tanh_and_mul", relative_error=relative_error(gelu_tanh_and_mul(gate_up), expected))

    qkv = randn(64, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cache = Cache([64] * 8)
    angles = torch.arange(640, device=CUDA)[:, None] * 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=CUDA) / HEAD_DIM)
    cos, sin = (torch.cat([each, each], -1).float() for each in (angles.cos(), angles.sin()))
    positions, slots = torch.randint(0, 640, (64,), device=CUDA), PAGE + torch.randperm(512, device=CUDA)[:64]
    q_weight, k_weight = randn(HEAD_DIM), randn(HEAD_DIM)
    for norms in ((None, None), (q_weight, k_weight)):
        q = rope_and_store(qkv, cos, sin, positions, slots, cache.k, cache.v, HEADS, *norms, 1e-6)
        parts = qkv.view(64, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        expected = []
        for part, scale in zip(parts[:2], norms, strict=True):
            wide = part.double()
            if scale is not None:
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * scale.double()
            low, high = wide.chunk(2, -1)
            rotated = wide * cos[positions].double()[:, None]
            expected.append(rotated + torch.cat([-high, low], -1) * sin[positions].double()[:, None])
        stored_k, stored_v = cache.k[slots // PAGE, :, slots % PAGE], cache.v[slots // PAGE, :, slots % PAGE]
        report.add(
            "check",
            f"rope_and_store norms={norms[0] is not None}",
            q_error=relative_error(q, expected[0]),
            k_error=relative_error(stored_k, expected[1]),
            v_same_bits=torch.equal(stored_v, parts[2]),
        )


# Times

DECODE_CONFIGS = [
    DecodeConfig(32, 4, 4),
    DecodeConfig(32, 4, 3),
    DecodeConfig(32, 2, 4),
    DecodeConfig(16, 2, 6),
]


@dataclass(frozen=True)
class DecodeCase:
    rows: int
    context: int
    splits: int = 1
    counted: bool = False
    dependent: bool = False
    rotary: bool = False
    shared_pages: int = 0
    config: DecodeConfig | None = None


def time_decode(report: Report, case: DecodeCase) -> None:
    rows, config = case.rows, case.config or DECODE_CONFIGS[0]
    name = f"rows={rows} context={case.context} splits={case.splits} shared_pages={case.shared_pages}"
    label = f"n={config.block_n}/{config.num_warps}/{config.num_stages}"
    label += " counted" * case.counted + " dependent" * case.dependent + " rotary" * case.rotary

    def work() -> None:
        lengths = [case.context - row % PAGE for row in range(rows)]
        num_bytes = 2 * sum(lengths) * KV_HEADS * HEAD_DIM * 2
        caches = [Cache(lengths, group=16, shared_pages=case.shared_pages) for _ in range(sets_for(num_bytes))]
        counters = split_counters(rows, KV_HEADS, CUDA) if case.counted else None
        qkv = randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        query = randn(rows, HEADS, HEAD_DIM)
        tables = randn(4096, HEAD_DIM // 2, dtype=torch.float32), randn(4096, HEAD_DIM // 2, dtype=torch.float32)
        positions = torch.tensor([length - 1 for length in lengths], device=CUDA)

        def call(index: int) -> Tensor:
            cache = caches[index]
            inputs = cache.k, cache.v, cache.table, cache.contexts, 0.09
            if case.rotary:
                # Every row writes to a page of its own, the way it does in a decode step.
                rotary = RotaryInputs(*tables, positions, cache.last_slots)
                return rotary_decode_attention(
                    qkv, rotary, *inputs, num_heads=HEADS, num_splits=case.splits, counters=counters,
                    dependent=case.dependent, config=config,
                )  # fmt: skip
            return paged_decode_attention(
                query, *inputs, num_splits=case.splits, counters=counters, dependent=case.dependent, config=config
            )

        us = microseconds(call, len(caches))
        report.add("decode", name, how=label, us=us, tb_s=num_bytes / us / 1e6)

    report.try_to("decode", f"{name} {label}", work)


def decode_cases() -> list[DecodeCase]:
    """What the attention of a decode step could look like, the more telling cases first."""
    cases = []
    for rows, splits in ((256, 1), (64, 4), (8, 6), (1024, 1)):
        for rotary in (False, True):
            for dependent in (False, True):
                cases.append(DecodeCase(rows, 384, splits, splits > 1, dependent, rotary))  # noqa: PERF401
    cases += [DecodeCase(256, 384, splits, counted) for splits in (2, 3) for counted in (False, True)]
    cases += [DecodeCase(64, 384, splits, counted) for splits in (2, 3, 4) for counted in (False, True)]
    cases += [DecodeCase(8, 384, splits, counted) for splits in (6, 12) for counted in (False, True)]
    cases += [DecodeCase(rows, 384, shared_pages=pages) for rows in (256, 1024) for pages in (2, 4)]
    cases += [DecodeCase(256, 384, config=config) for config in DECODE_CONFIGS[1:]]
    cases += [DecodeCase(256, 640), DecodeCase(1024, 640)]
    return cases


GEMMS = {
    "qkv": (2048, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCABULARY, HIDDEN),
}


def time_gemms(report: Report, name: str) -> None:
    outputs, inputs = GEMMS[name]
    weights = [randn(outputs, inputs, scale=0.03) for _ in range(sets_for(outputs * inputs * 2))]
    calls = 6 if name == "lm_head" else CALLS
    for rows in ROWS:
        x = randn(rows, inputs)
        for label, product in (("cublas", F.linear), ("invariant", invariant_linear)):
            us = microseconds(lambda index, x=x, product=product: product(x, weights[index]), len(weights), calls)
            num_bytes = 2.0 * (outputs * inputs + rows * (inputs + outputs))
            tflop_s = 2.0 * rows * inputs * outputs / us / 1e6
            report.add("gemm", f"{name} rows={rows}", how=label, us=us, tb_s=num_bytes / us / 1e6, tflop_s=tflop_s)


BestSlices = dict[tuple[int, int, int], int]


def time_slices(report: Report, name: str, best: BestSlices) -> None:
    """A product and the norm after it, for every number of slices; the fastest goes into ``best``."""
    outputs, inputs = GEMMS[name]
    weights = [randn(outputs, inputs, scale=0.03) for _ in range(sets_for(outputs * inputs * 2))]
    norm_weight = randn(outputs)
    for rows in (*ROWS[:-1], 512, ROWS[-1]):
        x, residual = randn(rows, inputs), randn(rows, outputs)
        times = {}
        for slices in possible_slices(inputs) if rows <= 512 else [1, 2]:

            def call(index: int, slices: int = slices, x: Tensor = x, residual: Tensor = residual) -> Tensor:
                if slices == 1:
                    return add_rms_norm(F.linear(x, weights[index]), residual, norm_weight, 1e-6)
                return sum_add_rms_norm(split_linear(x, weights[index], slices), None, residual, norm_weight, 1e-6)

            times[slices] = microseconds(call, len(weights))
        best[rows, outputs, inputs] = min(times, key=times.__getitem__)
        report.add(
            "split",
            f"{name} + norm rows={rows}",
            best=best[rows, outputs, inputs],
            suggested=suggest_slices(rows, outputs, inputs),
            **{f"us_{slices}": us for slices, us in times.items()},
        )


# The whole layer


@dataclass(frozen=True)
class Variant:
    """One way to run a decode step."""

    name: str
    slices: Callable[[int, int, int], int]
    dependent: bool
    rotary: bool
    counts: bool
    weight_mb: int = 0
    """Prefetched of each next weight, by the kernels between products."""
    cache_mb: int = 0
    """Prefetched of the next layer's pages, and of the weight after the attention's own."""


def variants(best: BestSlices) -> list[Variant]:
    def one(rows: int, outputs: int, inputs: int) -> int:
        return 1

    def measured(rows: int, outputs: int, inputs: int) -> int:
        return best.get((rows, outputs, inputs)) or suggest_slices(rows, outputs, inputs)

    return [
        Variant("baseline", one, False, False, False),
        Variant("+1 slices (best measured)", measured, False, False, False),
        Variant("+2 dependent launch", one, True, False, False),
        Variant("+3 rotary in attention", one, False, True, False),
        Variant("+5 splits counted", one, False, False, True),
        Variant("all", measured, True, True, True),
        Variant("all but 1", one, True, True, True),
        Variant("all but 2", measured, False, True, True),
        Variant("as shipped", suggest_slices, True, True, True),
        *(
            Variant(
                f"all, prefetch {weight_mb} MB of weights, {cache_mb} MB of cache",
                measured,
                True,
                True,
                True,
                weight_mb,
                cache_mb,
            )
            for weight_mb, cache_mb in ((32, 0), (32, 17), (32, 34), (8, 17), (16, 8))
        ),
    ]


def random_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=4096, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=CALLS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=4096,
    )  # fmt: skip
    default = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with CUDA:
            model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.5)
    return model


class LayerBench:
    """Decode steps of a random model in all their variants."""

    def __init__(self, model: Any, rows: int, context: int) -> None:
        self.spec = ModelSpec.of(model)
        self.model = model
        pages_per_row = -(-context // PAGE)
        self.cache = KVCache(self.spec, 1 + rows * pages_per_row, PAGE)
        for layer in range(self.spec.num_layers):
            for each in self.cache.layer(layer):
                each.normal_()
        self.lengths = context - torch.arange(rows, device=CUDA, dtype=torch.int32) % PAGE
        self.positions = self.lengths.long() - 1
        table = 1 + torch.randperm(rows * pages_per_row, device=CUDA).view(rows, pages_per_row)
        self.table = F.pad(table, (0, -pages_per_row % 16)).to(torch.int32)
        pages = table.gather(1, self.positions[:, None] // PAGE)[:, 0]
        self.slots = pages * PAGE + self.positions % PAGE
        # Two batches, so that a kernel that reads before its predecessor has written shows: it finds the other's.
        self.batches = torch.randint(0, self.spec.vocab_size, (2, rows), device=CUDA)
        self.ids = self.batches[0].clone()

    def step(self, variant: Variant) -> Callable[[], Tensor]:
        ops = CudaOps(slices=variant.slices, dependent=variant.dependent, prefetch_bytes=variant.weight_mb * 1_000_000)
        decoder = FusedDecoder(self.model, self.spec, ops)

        def run() -> Tensor:
            decode = CudaDecode(
                self.cache, self.table, self.lengths, dependent=variant.dependent, counts_splits=variant.counts,
                prefetch_bytes=variant.cache_mb * 1_000_000,
            )  # fmt: skip
            # A bound method is an attention that takes queries and nothing more.
            attention: Any = decode if variant.rotary else decode.__call__
            return decoder(self.ids, self.positions, self.slots, attention, self.cache)

        return run

    def invariant(self) -> list[Tensor]:
        """The outputs of both batches with other products: how far apart two correct results are."""
        decoder = FusedDecoder(self.model, self.spec, InvariantCudaOps(dependent=False))
        decode = CudaDecode(self.cache, self.table, self.lengths, dependent=False)
        return [
            decoder(ids, self.positions, self.slots, decode.__call__, self.cache).clone()  # type: ignore[arg-type]
            for ids in self.batches
        ]

    def measure(self, variant: Variant) -> tuple[float, list[Tensor], bool]:
        """Microseconds per layer, the outputs of both batches, and whether replays repeat them to the bit."""
        run = self.step(variant)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = run()
        seen: list[list[Tensor]] = [[], []]
        for replay in range(12):
            self.ids.copy_(self.batches[replay % 2])
            graph.replay()
            seen[replay % 2].append(output.clone())
        times = []
        for _ in range(9):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / self.spec.num_layers)
        repeatable = all(torch.equal(outputs[0], each) for outputs in seen for each in outputs)
        return statistics.median(times), [outputs[0] for outputs in seen], repeatable


@torch.no_grad()
def time_layers(report: Report, model: Any, rows: int, best: BestSlices, context: int = 384) -> None:
    bench = LayerBench(model, rows, context)
    reference: list[Tensor] = []
    for variant in variants(best):

        def work(variant: Variant = variant) -> None:
            us, outputs, repeatable = bench.measure(variant)
            if not reference:
                reference.extend(outputs)
                yardstick = relative_error(torch.cat(bench.invariant()), torch.cat(reference))
                report.add("layer", f"rows={rows} context={context}", how="yardstick", difference=yardstick)
            report.add(
                "layer",
                f"rows={rows} context={context}",
                how=variant.name,
                us=us,
                step_ms=us * CALLS / 1e3,
                difference=relative_error(torch.cat(outputs), torch.cat(reference)),
                repeatable=repeatable,
            )

        report.try_to("layer", f"rows={rows} {variant.name}", work)


def time_sampler(report: Report, rows: int) -> None:
    num_bytes = rows * VOCABULARY * 2
    sets = [randn(rows, VOCABULARY) for _ in range(sets_for(num_bytes))]
    keys, positions = torch.arange(rows, device=CUDA), torch.arange(rows, device=CUDA)
    temperature = torch.ones(rows, device=CUDA)
    for chunk in (4096, 8192):
        us = microseconds(
            lambda index, chunk=chunk: sample_tokens(sets[index], keys, positions, temperature, chunk=chunk), len(sets)
        )
        report.add("sampler", f"rows={rows}", chunk=chunk, us=us, tb_s=num_bytes / us / 1e6)


def time_small(report: Report, rows: int) -> None:
    x, residual, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)
    gate_up = randn(rows, 2 * INTERMEDIATE)
    qkv = randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cache = Cache([PAGE] * rows)
    tables = randn(1024, HEAD_DIM, dtype=torch.float32), randn(1024, HEAD_DIM, dtype=torch.float32)
    positions = torch.arange(rows, device=CUDA) % 640
    slots = PAGE * (1 + torch.arange(rows, device=CUDA))
    state = decode_state(rows)
    tokens, logprobs = torch.arange(rows, device=CUDA), torch.zeros(rows, device=CUDA)
    cases: dict[str, Callable[[int], object]] = {
        "rms_norm": lambda _: rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda _: add_rms_norm(x, residual, weight, 1e-6),
        "silu_and_mul": lambda _: silu_and_mul(gate_up),
        "rope_and_store": lambda _: rope_and_store(qkv, *tables, positions, slots, cache.k, cache.v, HEADS),
        "advance": lambda _: advance(tokens, logprobs, page_tokens=PAGE, **state),
    }
    for name, call in cases.items():

        def work(name: str = name, call: Callable[[int], object] = call) -> None:
            report.add("small", f"{name} rows={rows}", us=microseconds(call, 1))

        report.try_to("small", f"{name} rows={rows}", work)


def time_activation(report: Report, rows: int) -> None:
    """The activation right after its product, which leaves some of its input in the second-level cache."""
    weights = [randn(2 * INTERMEDIATE, HIDDEN, scale=0.03) for _ in range(sets_for(4 * INTERMEDIATE * HIDDEN))]
    x = randn(rows, HIDDEN)
    alone = microseconds(lambda index: F.linear(x, weights[index]), len(weights))
    for reverse in (False, True):
        for stream in (False, True):
            us = microseconds(
                lambda index, reverse=reverse, stream=stream: silu_and_mul(
                    F.linear(x, weights[index]), reverse=reverse, stream=stream
                ),
                len(weights),
            )
            how = f"after gate_up reverse={reverse} stream={stream}"
            report.add("small", f"silu_and_mul rows={rows}", how=how, us=us - alone, product_us=alone)


def decode_state(rows: int) -> dict[str, Tensor]:
    def full(value: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=CUDA)

    return {
        "last_tokens": full(0, torch.int64),
        "positions": full(100, torch.int64),
        "context_lens": full(101, torch.int32),
        "num_generated": full(0, torch.int32),
        "max_new": full(1 << 30, torch.int32),
        "min_new": full(0, torch.int32),
        "stop_ids": torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=CUDA),
        "alive": full(1, torch.int8),
        "slots": full(0, torch.int64),
        "page_table": torch.ones(rows, 16, dtype=torch.int32, device=CUDA),
        "out_tokens": torch.zeros(64, rows, dtype=torch.int32, device=CUDA),
        "out_logprobs": torch.zeros(64, rows, device=CUDA),
        "step_index": torch.zeros(1, dtype=torch.int32, device=CUDA),
    }


PREFILL_CONFIGS = [
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(64, 32, 4, 3),
]


def time_prefill(report: Report, chunks: int, length: int) -> None:
    caches = [Cache([length] * chunks) for _ in range(4)]
    q = randn(chunks * length, HEADS, HEAD_DIM)
    starts = torch.arange(chunks + 1, dtype=torch.int32, device=CUDA) * length
    flops = 4.0 * chunks * HEADS * HEAD_DIM * length * (length + 1) / 2
    for config in PREFILL_CONFIGS:
        tiles = torch.from_numpy(build_tiles([length] * chunks, queries_per_tile(HEADS, KV_HEADS, config))).to(CUDA)
        label = f"m={config.block_m} n={config.block_n} warps={config.num_warps} stages={config.num_stages}"

        def work(config: PrefillConfig = config, tiles: Tensor = tiles, label: str = label) -> None:
            def call(index: int) -> Tensor:
                cache = caches[index]
                return paged_prefill_attention(
                    q, cache.k, cache.v, cache.table, tiles, starts, cache.contexts, 0.09, config=config
                )

            us = microseconds(call, len(caches))
            report.add("prefill", f"{chunks} x {length}", config=label, us=us, tflop_s=flops / us / 1e6)

        report.try_to("prefill", f"{chunks} x {length} {label}", work)


SECTIONS = ("split", "layer", "check", "decode", "small", "sampler", "gemm", "prefill")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all results to this JSON file")
    parser.add_argument("--seconds", type=float, default=140.0, help="start nothing new after this long")
    parser.add_argument("--only", nargs="*", default=SECTIONS[:5], help=f"sections: {' '.join(SECTIONS)}")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    best: BestSlices = {}

    def check() -> None:
        for each in (check_small, check_decode, check_prefill, check_sampler, check_matmul):
            report.try_to("check", each.__name__, lambda each=each: each(report))

    def split() -> None:
        for name in ("down", "o"):
            report.try_to("split", name, lambda name=name: time_slices(report, name, best))

    def layer() -> None:
        model = random_model()
        for rows in (256, 1024, 64, 8):
            report.try_to("layer", f"rows={rows}", lambda rows=rows: time_layers(report, model, rows, best))
            torch.cuda.empty_cache()

    def decode() -> None:
        for case in decode_cases():
            time_decode(report, case)
            torch.cuda.empty_cache()

    def small() -> None:
        for rows in (256, 1024):
            report.try_to("small", f"silu rows={rows}", lambda rows=rows: time_activation(report, rows))
        for rows in ROWS:
            report.try_to("small", f"rows={rows}", lambda rows=rows: time_small(report, rows))

    def sampler() -> None:
        for rows in ROWS:
            report.try_to("sampler", f"rows={rows}", lambda rows=rows: time_sampler(report, rows))

    def gemm() -> None:
        for name in GEMMS:
            report.try_to("gemm", name, lambda name=name: time_gemms(report, name))
            torch.cuda.empty_cache()

    def prefill() -> None:
        for chunks, length in ((64, 128), (16, 1024)):
            report.try_to("prefill", f"{chunks} x {length}", lambda c=chunks, n=length: time_prefill(report, c, n))

    works = (split, layer, check, decode, small, sampler, gemm, prefill)
    for section, work in zip(SECTIONS, works, strict=True):
        if section in arguments.only:
            report.try_to(section, "section", work)
            print(f"{section:10s} done with {report.ends - time.monotonic():.0f} s left", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(report.results, indent=1))


if __name__ == "__main__":
    main()
