"""What the kernel checks and timings share: the shape of the model, inputs, a paged cache and a stopwatch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.engine.kernels import prefill_attention
from headwater.engine.kernels.decode_attention import DecodeConfig, paged_decode_attention

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

Values = dict[str, Any]


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
