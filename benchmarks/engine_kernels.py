"""Check and time the engine's kernels on a CUDA device.

    PYTHONPATH=src python benchmarks/engine_kernels.py --only check layer --out kernels.json

Times are microseconds per call inside a replayed CUDA graph. Where a kernel reads weights, a cache or logits, every
call of the graph reads others, so that the second-level cache does not stand in for memory. The exit status is 1 if
anything raised, was not the same to the bit where it must be, or was further than ``MAX_ERROR`` from its reference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from shapes import build_model
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.attention.cuda import CudaDecode
from headwater.engine.kernels import prefill_attention
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.advance import advance
from headwater.engine.kernels.decode_attention import DecodeConfig, paged_decode_attention, suggest_num_splits
from headwater.engine.kernels.matmul import invariant_linear
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.sampling import sample_tokens
from headwater.engine.kernels.split_linear import possible_slices, split_linear, suggest_slices
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec
from headwater.engine.rows import Rows
from headwater.engine.runners.cuda_ops import CudaOps
from headwater.engine.runners.decoder import FusedDecoder
from headwater.engine.sampler import uniforms

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
MODEL = "qwen2.5-1.5b"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 12, 2, 128, 1536, 8960, 151936
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
# Outputs and inputs of each.
PRODUCTS = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE), "lm_head": (VOCABULARY, HIDDEN)}  # fmt: skip
PAGE, SCALE, EPS = 64, 0.09, 1e-6
ROWS, CONTEXT = (8, 64, 256, 1024), 384
CALLS, COLD_BYTES = 28, 500e6
MAX_ERROR = 0.02  # of the largest value: a few roundings of bfloat16

Values = dict[str, Any]


def run(work: Callable[..., Values], case: Values) -> Values:
    name = " ".join([work.__name__, *(f"{key}={value}" for key, value in case.items())])
    try:
        values = work(**case)
    except Exception:  # noqa: BLE001 - one bad kernel or config must not cost the rest of the run
        values = {"worked": False, "traceback": traceback.format_exc(limit=-4)}
    # "Not below" rather than "above", so that NaN is wrong.
    failed = any(each is False or ("error" in key and not each < MAX_ERROR) for key, each in values.items())
    shown = (f"{key}={each:.4g}" if isinstance(each, float) else f"{key}={each}" for key, each in values.items())
    print(f"{name:60s}", *["FAILED"] * failed, *shown, flush=True)
    return {"name": name, "failed": failed, **values}


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


def cold(make: Callable[[], Any], num_bytes: float) -> list[Any]:
    """Inputs of this size, as many as exceed the second-level cache several times."""
    return [make() for _ in range(max(2, min(CALLS, math.ceil(COLD_BYTES / num_bytes))))]


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

    def prefill(
        self, q: Tensor, chunks: Sequence[tuple[int, int, int]], config: prefill_attention.PrefillConfig
    ) -> partial[Tensor]:
        """The attention, ready to be called, of chunks of (row, queries, context)."""
        rows, lengths, contexts = zip(*chunks, strict=True)
        queries = prefill_attention.queries_per_tile(q.shape[1], self.keys.shape[1], config)
        tiles = prefill_attention.build_tiles(lengths, queries)
        starts = [sum(lengths[:chunk]) for chunk in range(len(lengths) + 1)]
        numbers = [torch.as_tensor(each, dtype=torch.int32, device=DEVICE) for each in (tiles, starts, contexts)]
        cache = self.keys, self.values, self.table[list(rows)]
        return partial(prefill_attention.paged_prefill_attention, q, *cache, *numbers, SCALE, config=config)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def check_norms_and_activations() -> Values:
    x, residual, weight, gate_up = randn(64, HIDDEN), randn(64, HIDDEN), randn(HIDDEN), randn(64, 2 * INTERMEDIATE)
    total, (gate, up) = x + residual, gate_up.double().chunk(2, -1)
    return {
        "rms_norm_error": relative_error(rms_norm(x, weight, EPS), norm(x, weight)),
        "add_rms_norm_error": relative_error(add_rms_norm(x, residual, weight, EPS), norm(total, weight)),
        "residual_same_bits": torch.equal(total, residual),
        "silu_error": relative_error(silu_and_mul(gate_up), F.silu(gate) * up),
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


def check_decode(dtype: torch.dtype, shape: tuple[int, int, int], splits: int) -> Values:
    pages = Pages([0, 1, 63, 64, 65, 384, 640, 2500], *shape[1:], dtype)
    q = randn(8, shape[0], shape[2], dtype=dtype)
    actual = pages.decode(q, splits)
    expected = torch.cat([pages.attend(row, q[row : row + 1]) for row in range(1, 8)])
    return {"error": relative_error(actual[1:], expected), "empty_row_is_zero": not bool(actual[0].any())}


def check_prefill(dtype: torch.dtype, shape: tuple[int, int, int]) -> Values:
    pages, q = Pages([300, 77], *shape[1:], dtype), randn(377, shape[0], shape[2], dtype=dtype)
    config = prefill_attention.default_config(shape[2], q.element_size())
    whole = pages.prefill(q, [(0, 300, 300), (1, 77, 77)], config)()
    chunks = pages.prefill(q[:300], [(0, 100, 100), (0, 1, 101), (0, 199, 300)], config)()
    single = pages.prefill(q[:300], [(0, 1, context) for context in range(1, 301)], config)()
    error = relative_error(whole, torch.cat([pages.attend(0, q[:300]), pages.attend(1, q[300:])]))
    same = torch.equal(whole[:300], chunks), torch.equal(whole[:300], single)
    return {"error": error, "chunks_same_bits": same[0], "single_same_bits": same[1]}


def check_sampler(dtype: torch.dtype) -> Values:
    logits = randn(512, VOCABULARY, dtype=dtype, scale=3.0)
    logits[:, 1000:3000] = -torch.inf
    keys, positions = torch.randint(-(2**62), 2**62, (512,), device=DEVICE), torch.arange(512, device=DEVICE)
    temperature = torch.tensor([0.0, 0.8, 0.8, 0.8], device=DEVICE).repeat(128)
    inputs = logits, keys, positions, temperature
    tokens, logprobs = sample_tokens(*inputs)
    reference = (logits.double() / torch.where(temperature == 0, 1.0, temperature)[:, None].double()).log_softmax(-1)
    cumulative = reference.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms(keys, positions)[:, None] * cumulative[:, -1:], right=True)[:, 0]
    same = tokens == torch.where(temperature == 0, logits.argmax(-1), drawn)
    alone = zip(*(sample_tokens(*(each[row : row + 1] for each in inputs)) for row in range(8)), strict=True)
    return {
        # Float32 sums may cross a uniform a token earlier or later than float64 ones; greedy rows have no excuse.
        "drawn_otherwise_error": 1.0 - float(same.double().mean()),
        "greedy_same": bool(same[::4].all()),
        "logprob_error": float((logprobs - reference.gather(-1, tokens[:, None])[:, 0]).abs().max()),
        "alone_same_bits": all(map(torch.equal, map(torch.cat, alone), (tokens[:8], logprobs[:8]))),
    }


def check_invariant_linear() -> Values:
    x, weight, bias = randn(1000, HIDDEN), randn(QKV, HIDDEN, scale=0.03), randn(QKV)
    whole = invariant_linear(x, weight, bias)
    fewer = [invariant_linear(x[:rows], weight, bias) for rows in (1, 8, 64, 65, 256)]
    error = relative_error(whole, F.linear(x.double(), weight.double(), bias.double()))
    return {"error": error, "same_bits": all(torch.equal(whole[: len(each)], each) for each in fewer)}


def check_split_linear(product: str) -> Values:
    outputs, inputs = PRODUCTS[product]
    x, weight, bias = randn(256, inputs), randn(outputs, inputs, scale=0.03), randn(outputs)
    before, norm_weight = randn(256, outputs), randn(outputs)
    exact = before.double() + F.linear(x.double(), weight.double(), bias.double())
    errors = {}
    for slices in possible_slices(inputs)[1:]:
        residual = before.clone()
        actual = sum_add_rms_norm(split_linear(x, weight, slices), bias, residual, norm_weight, EPS)
        errors[f"sum_error_{slices}"] = relative_error(residual, exact)
        errors[f"norm_error_{slices}"] = relative_error(actual, norm(exact, norm_weight))
    return errors


@cache
def fused_decoder() -> tuple[FusedDecoder, ModelSpec]:
    model = build_model(MODEL, DEVICE, DTYPE)
    spec = ModelSpec.of(model)
    return FusedDecoder(model, spec, CudaOps()), spec


def layer(rows: int) -> Values:
    """The engine's decoder as it is, all layers in one graph."""
    decoder, spec = fused_decoder()
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
    """What stands between products, in microseconds, with its inputs in the second-level cache as in a step."""
    x, residual, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)
    parts, gate_up = randn(4, rows, HIDDEN, dtype=torch.float32), randn(rows, 2 * INTERMEDIATE)
    qkv, pages, tables = randn(rows, QKV), Pages([PAGE] * rows), randn(2, 1024, HEAD_DIM, dtype=torch.float32)
    at, logprobs = torch.arange(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
    rope = *tables, at % 640, PAGE * (1 + at), pages.keys, pages.values, HEADS
    state = Rows(rows, 16, 64, DEVICE)
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


def grid(work: Callable[..., Values], **values: Iterable[object]) -> list[tuple[Callable[..., Values], Values]]:
    """``work`` with each combination of the values of its arguments."""
    return [(work, dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())]


SECTIONS = {
    "check": [
        *grid(check_norms_and_activations),
        *grid(check_rope, norms=(False, True)),
        *grid(check_decode, dtype=(DTYPE, torch.float32), shape=((12, 2, 128), (9, 3, 64)), splits=(1, 4)),
        *grid(check_prefill, dtype=(DTYPE, torch.float32), shape=((12, 2, 128), (9, 3, 64))),
        *grid(check_sampler, dtype=(DTYPE, torch.float32)),
        *grid(check_invariant_linear),
        *grid(check_split_linear, product=("o", "down")),
    ],
    "layer": grid(layer, rows=ROWS),
    "split": grid(split, product=("down", "o"), rows=(8, 64, 128, 256, 512, 1024)),
    "decode": [
        *grid(decode, rows=(8, 64), splits=(1, 2, 4, 8, 16)),
        *grid(decode, rows=(256, 1024), splits=(1, 2)),
        *grid(decode, rows=(256,), config=((32, 4, 3), (32, 2, 4), (16, 2, 6), (64, 4, 3))),
        *grid(decode, rows=(256, 1024), context=(640,)),
        *grid(decode, rows=(256, 1024), shared=(2, 4)),
    ],
    "small": grid(small, rows=ROWS),
    "sampler": grid(sampler, rows=ROWS, chunk=(4096, 8192)),
    "gemm": grid(gemm, product=PRODUCTS, rows=ROWS),
    "prefill": grid(prefill, prompts=((64, 128), (16, 1024)), config=((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3))),
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
    ends, results = time.monotonic() + arguments.seconds, []
    for section, (work, case) in ((name, each) for name in arguments.only for each in SECTIONS[name]):
        if time.monotonic() > ends:
            print(f"out of time; left out: {section} from {case} on, and what follows", flush=True)
            break
        results.append({"section": section, **run(work, case)})
        torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(each["failed"] for each in results))


if __name__ == "__main__":
    main()
