"""Check and time the engine's Triton kernels on a CUDA device.

    PYTHONPATH=src python benchmarks/kernels.py --out kernels.json

Times are microseconds per call inside a replayed CUDA graph. Every call of a graph reads other weights or another
cache, so that the second-level cache does not stand in for memory.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headwater.engine.kernels.advance import MAX_STOP_IDS, advance
from headwater.engine.kernels.decode_attention import DecodeConfig, paged_decode_attention, suggest_num_splits
from headwater.engine.kernels.matmul import (
    MatmulConfig,
    gate_up_silu,
    invariant_linear,
    split_k_counters,
    split_k_linear,
)
from headwater.engine.kernels.norm import add_rms_norm, rms_norm
from headwater.engine.kernels.prefill_attention import (
    PrefillConfig,
    build_tiles,
    default_config,
    paged_prefill_attention,
    queries_per_tile,
)
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.sampling import sample_tokens

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
PAGE = 64
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 12, 2, 128, 1536, 8960, 151936
CALLS = 28
COLD_BYTES = 500e6


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
    """A paged cache of rows with the given lengths, on shuffled pages."""

    def __init__(
        self, lengths: Sequence[int], kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, dtype: torch.dtype = BF16
    ) -> None:
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
        self.table = table.to(CUDA)
        self.lengths = list(lengths)
        self.contexts = torch.tensor(self.lengths, dtype=torch.int32, device=CUDA)
        self.bytes = 2 * sum(lengths) * kv_heads * head_dim * self.k.element_size()

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
    counters = split_k_counters(CUDA)
    x, weight = randn(1000, HIDDEN), randn(2048, HIDDEN, scale=0.03)
    bias, residual = randn(2048), randn(1000, 2048)
    whole = invariant_linear(x, weight, bias)
    same = all(torch.equal(whole[:rows], invariant_linear(x[:rows], weight, bias)) for rows in (1, 8, 64, 65, 256))
    exact = F.linear(x.double(), weight.double(), bias.double())
    report.add("check", "invariant_linear", relative_error=relative_error(whole, exact), same_bits=same)
    for rows in (1, 8, 64, 256, 1000):
        actual = split_k_linear(x[:rows], weight, bias, residual[:rows], counters=counters)
        again = [split_k_linear(x[:rows], weight, bias, residual[:rows], counters=counters) for _ in range(20)]
        report.add(
            "check",
            f"split_k_linear rows={rows}",
            relative_error=relative_error(actual, exact[:rows] + residual[:rows]),
            repeatable=all(torch.equal(actual, each) for each in again),
            counters_zero=not bool(counters.any()),
        )
    weight = randn(2 * INTERMEDIATE, HIDDEN, scale=0.03)
    for rows in (8, 64, 256):
        gate, up = F.linear(x[:rows].double(), weight.double()).chunk(2, -1)
        actual = gate_up_silu(x[:rows], weight)
        report.add("check", f"gate_up_silu rows={rows}", relative_error=relative_error(actual, F.silu(gate) * up))


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
    DecodeConfig(64, 4, 3),
    DecodeConfig(64, 8, 3),
    DecodeConfig(64, 4, 2),
    DecodeConfig(16, 2, 6),
]


def time_decode(
    report: Report, rows: int, context: int, configs: Sequence[DecodeConfig], splits: Sequence[int], heads: int = HEADS,
    kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM,
) -> None:  # fmt: skip
    lengths = [context - row % PAGE for row in range(rows)]
    num_bytes = 2 * sum(lengths) * kv_heads * head_dim * 2
    caches = [Cache(lengths, kv_heads, head_dim) for _ in range(sets_for(num_bytes))]
    q = randn(rows, heads, head_dim)
    for config in configs:
        for num_splits in splits:
            name = f"rows={rows} context={context} d={head_dim}"
            label = f"n={config.block_n} warps={config.num_warps} stages={config.num_stages} splits={num_splits}"

            def work(
                config: DecodeConfig = config, num_splits: int = num_splits, name: str = name, label: str = label
            ) -> None:
                def call(index: int) -> Tensor:
                    cache = caches[index]
                    return paged_decode_attention(
                        q, cache.k, cache.v, cache.table, cache.contexts, 0.09, num_splits=num_splits, config=config
                    )

                us = microseconds(call, len(caches))
                report.add("decode", name, config=label, us=us, tb_s=num_bytes / us / 1e6)

            report.try_to("decode", f"{name} {label}", work)


GEMMS = {
    "qkv": (2048, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCABULARY, HIDDEN),
}

SPLIT_K_CONFIGS = {
    8: [MatmulConfig(16, 64, 128, 4, 4, 8), MatmulConfig(16, 64, 128, 4, 4, 4)],
    64: [
        MatmulConfig(64, 64, 64, 4, 4, 8),
        MatmulConfig(64, 64, 64, 4, 4, 4),
        MatmulConfig(32, 64, 128, 4, 4, 4),
    ],
    256: [
        MatmulConfig(64, 64, 64, 4, 4, 4),
        MatmulConfig(128, 64, 64, 8, 4, 4),
        MatmulConfig(128, 64, 64, 8, 4, 2),
        MatmulConfig(128, 128, 64, 8, 4, 4),
    ],
}

GATE_UP_CONFIGS = {
    8: [MatmulConfig(16, 64, 64, 4, 4), MatmulConfig(16, 64, 128, 4, 3)],
    64: [MatmulConfig(64, 64, 64, 4, 4), MatmulConfig(64, 128, 64, 8, 3)],
    256: [MatmulConfig(128, 64, 64, 8, 4), MatmulConfig(128, 128, 64, 8, 3), MatmulConfig(256, 64, 64, 8, 3)],
    1024: [MatmulConfig(128, 128, 64, 8, 3), MatmulConfig(256, 64, 64, 8, 3)],
}


def time_gemms(report: Report, name: str, tokens: Sequence[int]) -> None:
    outputs, inputs = GEMMS[name]
    weights = [randn(outputs, inputs, scale=0.03) for _ in range(sets_for(outputs * inputs * 2))]
    calls = 6 if name == "lm_head" else CALLS
    counters = split_k_counters(CUDA)

    def measure(rows: int, label: str, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        x = randn(rows, inputs)

        def work() -> None:
            us = microseconds(lambda index: product(x, weights[index]), len(weights), calls)
            num_bytes = 2.0 * (outputs * inputs + rows * (inputs + outputs))
            tflop_s = 2.0 * rows * inputs * outputs / us / 1e6
            report.add("gemm", f"{name} rows={rows}", how=label, us=us, tb_s=num_bytes / us / 1e6, tflop_s=tflop_s)

        report.try_to("gemm", f"{name} rows={rows} {label}", work)

    for rows in tokens:
        measure(rows, "cublas", F.linear)
        if rows in (8, 256):
            measure(rows, "invariant", invariant_linear)
        if name == "gate_up":
            measure(rows, "cublas + silu_and_mul", lambda x, weight: silu_and_mul(F.linear(x, weight)))
            for config in GATE_UP_CONFIGS.get(rows, []):
                label = f"gate_up_silu {short(config)}"
                measure(rows, label, lambda x, weight, config=config: gate_up_silu(x, weight, config=config))
        elif name != "lm_head":
            for config in SPLIT_K_CONFIGS.get(rows, []):
                measure(
                    rows,
                    f"split_k {short(config)}",
                    lambda x, weight, config=config: split_k_linear(x, weight, counters=counters, config=config),
                )


def short(config: MatmulConfig) -> str:
    return (
        f"{config.block_m}x{config.block_n}x{config.block_k} warps={config.num_warps} "
        f"stages={config.num_stages} split={config.split_k}"
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all results to this JSON file")
    parser.add_argument("--seconds", type=float, default=220.0, help="start nothing new after this long")
    parser.add_argument("--only", nargs="*", default=[], help="sections: check decode gemm sampler small prefill")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)

    def wanted(section: str) -> bool:
        return not arguments.only or section in arguments.only

    def save() -> None:
        if arguments.out:
            arguments.out.write_text(json.dumps(report.results, indent=1))

    if wanted("check"):
        for check in (check_small, check_decode, check_prefill, check_sampler, check_matmul):
            report.try_to("check", check.__name__, lambda check=check: check(report))
    if wanted("decode"):
        quick = DECODE_CONFIGS[:2]
        time_decode(report, 256, 384, DECODE_CONFIGS, [1, 2])
        time_decode(report, 256, 640, DECODE_CONFIGS[:5], [1])
        time_decode(report, 1024, 384, quick, [1])
        time_decode(report, 1024, 640, quick, [1])
        time_decode(report, 64, 384, DECODE_CONFIGS[:4], [2, 4])
        time_decode(report, 64, 640, quick, [1, 4])
        for context in (384, 640):
            time_decode(report, 8, context, quick, [4, suggest_num_splits(8, KV_HEADS, context)])
        time_decode(report, 256, 384, [DecodeConfig(64, 4, 4), DecodeConfig(64, 4, 3)], [1], 9, 3, 64)
        save()
    if wanted("gemm"):
        for name in ("o", "down", "gate_up", "qkv"):
            time_gemms(report, name, (8, 64, 256, 512, 1024))
            torch.cuda.empty_cache()
        time_gemms(report, "lm_head", (8, 64, 256, 512, 1024))
        torch.cuda.empty_cache()
        save()
    if wanted("sampler"):
        for rows in (8, 64, 256, 1024):
            report.try_to("sampler", f"rows={rows}", lambda rows=rows: time_sampler(report, rows))
    if wanted("small"):
        for rows in (8, 64, 256, 1024):
            report.try_to("small", f"rows={rows}", lambda rows=rows: time_small(report, rows))
    if wanted("prefill"):
        for chunks, length in ((64, 128), (16, 1024)):
            report.try_to("prefill", f"{chunks} x {length}", lambda c=chunks, n=length: time_prefill(report, c, n))
    save()


if __name__ == "__main__":
    main()
