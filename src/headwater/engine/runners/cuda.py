"""The runner for a CUDA device: fused layers, cuBLAS and Triton kernels, and one CUDA graph per number of rows.

A decode step reads and writes only the tensors of ``DecodeRows``. It is captured once per bucket of rows and then
replayed, so Python does no work per token. Prompts differ in shape and are launched kernel by kernel.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.engine.attention import PagedAttention
from headwater.engine.attention.cuda import CudaDecode, CudaPrefill
from headwater.engine.guides import Guidance
from headwater.engine.kernels.activation import silu_and_mul
from headwater.engine.kernels.advance import advance
from headwater.engine.kernels.gated_linear import gated_linear
from headwater.engine.kernels.linear import (
    has_scaled_tiles,
    invariant_linear,
    invariant_parts,
    split_linear,
    suggest_slices,
)
from headwater.engine.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from headwater.engine.kernels.rope import rope_and_store
from headwater.engine.kernels.sampling import sample_tokens
from headwater.engine.kernels.truncation import sample_truncated
from headwater.engine.kv_cache import KVCache
from headwater.engine.media import MediaInputs
from headwater.engine.model_spec import FUSED, ModelSpec, can_fuse
from headwater.engine.plans import NewRow, PrefillBatch
from headwater.engine.rows import DecodeRows
from headwater.engine.runners.decoder import HeadNorms, Projection, Rotary
from headwater.engine.runners.plain import Output, Runner
from headwater.engine.sampler import SamplingBatch, SamplingNeeds
from headwater.models.capture import capturing
from headwater.models.precision import wide_linear

T = TypeVar("T")

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_BUCKET_STEP = 64
"""Distance of further buckets: a compromise between the number of graphs to capture and padding."""


class CudaOps:
    """The decoder's operations on CUDA: cuBLAS for products, Triton kernels for the rest."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def wide_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return wide_linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def linear_add_rms_norm(
        self, x: Tensor, projection: Projection, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        slices = suggest_slices(x.shape[0], *projection.weight.shape)
        if slices > 1:
            parts = split_linear(x, projection.weight, slices)
            return sum_add_rms_norm(parts, projection.bias, residual, norm_weight, eps)
        product = self.linear if residual.dtype == x.dtype else self.wide_linear
        return add_rms_norm(product(x, projection.weight, projection.bias), residual, norm_weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

    def rope_and_store(
        self, qkv: Tensor, rotary: Rotary, slots: Tensor, cache: KVCache, layer: int, norms: HeadNorms | None
    ) -> Tensor:
        keys, values = cache.layer(layer)
        return rope_and_store(
            qkv,
            rotary.cos,
            rotary.sin,
            rotary.positions,
            slots,
            keys,
            values,
            cache.spec.num_heads,
            q_norm=None if norms is None else norms.query,
            k_norm=None if norms is None else norms.key,
            eps=0.0 if norms is None else norms.eps,
        )


class InvariantCudaOps(CudaOps):
    """Products in fixed tiles, so that a token's bits do not depend on the number of other tokens."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return invariant_linear(x, weight, bias)

    def wide_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return invariant_linear(x, weight, bias, torch.float32)

    def linear_add_rms_norm(
        self, x: Tensor, projection: Projection, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        if has_scaled_tiles(x.device):
            parts = invariant_parts(x, projection.weight)
            return sum_add_rms_norm(parts, projection.bias, residual, norm_weight, eps)
        # Never in slices whose number depends on the number of rows, as ``split_linear`` has them.
        product = invariant_linear(x, projection.weight, projection.bias, residual.dtype)
        return add_rms_norm(product, residual, norm_weight, eps)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if has_scaled_tiles(x.device) and x.element_size() == 2:
            return gated_linear(x, weight, bias)
        return super().gated_linear(x, weight, bias)


class CudaRunner(Runner):
    """``Runner`` with CUDA graphs for decoding."""

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        cache: KVCache,
        rows: DecodeRows,
        *,
        deterministic: bool,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """``stream`` is the engine's own stream. Without one, it shares the default stream with the whole process."""
        if deterministic and not can_fuse(model.config.get_text_config()):
            raise ModelError(
                f"engine.deterministic = true: on a GPU this mode supports {', '.join(FUSED)} models, not "
                f"{spec.model_type}; use engine.deterministic=false, or model.device=cpu"
            )
        super().__init__(model, spec, cache, rows, InvariantCudaOps() if deterministic else CudaOps())
        self._deterministic = deterministic
        more = range(_BUCKETS[-1] + _BUCKET_STEP, rows.capacity + _BUCKET_STEP, _BUCKET_STEP)
        self._buckets: list[int] = [bucket for bucket in (*_BUCKETS, *more) if bucket < rows.capacity] + [rows.capacity]
        self._graphs: dict[tuple[int, SamplingNeeds, int, int], torch.cuda.CUDAGraph] = {}
        self._logit_graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """For guided steps: graphs that end with the logits, and where they write them."""
        self._graph_memory: Any = None
        self._stream = stream
        self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._made.record(torch.cuda.current_stream(spec.device))

    def use_device(self) -> None:
        torch.cuda.set_device(self.spec.device)
        if self._stream is not None:
            self._stream.wait_event(self._made)  # the weights were made on another stream
            torch.cuda.set_stream(self._stream)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.spec.device).synchronize()

    def callers_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.spec.device)

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        own = torch.cuda.current_stream(self.spec.device)
        if stream == own:
            yield
            return
        stream.wait_stream(own)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            own.wait_stream(stream)

    def bucket_of(self, num_rows: int) -> int:
        return self._buckets[bisect.bisect_left(self._buckets, num_rows)]

    def forget_addresses(self) -> None:
        self._graphs.clear()
        self._logit_graphs.clear()
        self._graph_memory = None

    @torch.inference_mode()
    def decode(
        self,
        num_rows: int,
        num_steps: int,
        needs: SamplingNeeds,
        cut_rows: NDArray[np.int64] | None = None,
        guidance: Guidance | None = None,
    ) -> Output:
        num_cut = 0
        if needs.truncates and cut_rows is not None and len(cut_rows):
            num_cut = self._cut_bucket(len(cut_rows), num_rows)
            self.rows.set_cut_rows(cut_rows, num_cut)
        if guidance is not None:
            self._begin_steps(num_rows)
            return self._guided_step(num_rows, needs, guidance)
        graph = self._graph(num_rows, needs, num_cut)  # before the first step, because capturing runs one
        self._begin_steps(num_rows)
        for _ in range(num_steps):
            graph.replay()
        return self._read(num_steps, slice(0, num_rows))

    def _begin_steps(self, num_rows: int) -> None:
        self.rows.step.zero_()
        self.rows.refresh_slots(num_rows, self.cache.page_tokens)

    def _cut_bucket(self, num_cut: int, num_rows: int) -> int:
        """The number of truncated rows that a graph handles: a power of four, or all rows."""
        bucket = 1
        while bucket < num_cut:
            bucket *= 4
        return min(bucket, num_rows)

    def _graph(self, num_rows: int, needs: SamplingNeeds, num_cut: int) -> torch.cuda.CUDAGraph:
        # The sampling kernels handle temperature, greedy rows and filters. Only other needs require another graph.
        needs = replace(needs, truncates=num_cut > 0, is_wide=False, scales=True, has_greedy=True, is_guided=False)
        # This table moves when it grows. Graphs that read the old table are not used again.
        width = self.rows.early_stop_ids.shape[1] if needs.has_minimum else 0
        key = num_rows, needs, num_cut, width
        if key not in self._graphs:
            self._graphs[key], _ = self._capture(num_rows, lambda: self._decode_step(num_rows, needs, num_cut))
        return self._graphs[key]

    def _capture(self, num_rows: int, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of ``step``, and what ``step`` returned: tensors to which every replay writes."""
        with self._idle_rows(num_rows):
            step()  # compiles kernels, which is not possible during a capture
            self.synchronize()
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, pool=self._graph_memory, stream=self._stream):
                made = step()
        self._graph_memory = graph.pool()
        return graph, made

    def _decode_logits(self, num_rows: int) -> Tensor:
        if num_rows not in self._logit_graphs:
            self._logit_graphs[num_rows] = self._capture(num_rows, lambda: self._logits(self._decode_hidden(num_rows)))
        graph, logits = self._logit_graphs[num_rows]
        graph.replay()
        return logits

    @contextmanager
    def _idle_rows(self, num_rows: int) -> Iterator[None]:
        """Mark all rows as stopped during a capture, so that the trial step changes nothing."""
        alive, slots = self.rows.alive[:num_rows].clone(), self.rows.slots[:num_rows].clone()
        self.rows.alive[:num_rows] = False
        self.rows.slots[:num_rows] = 0
        try:
            yield
        finally:
            self.rows.alive[:num_rows] = alive
            self.rows.slots[:num_rows] = slots

    def _decode_step(self, num_rows: int, needs: SamplingNeeds, num_cut: int = 0) -> None:
        rows, first = self.rows, slice(0, num_rows)
        logits = self._logits(self._decode_hidden(num_rows))
        if needs.has_minimum:
            logits = rows.forbid_early_stops(logits, first)
        settings = rows.sampling(first, needs, rows.cut_rows[:num_cut])
        tokens, logprobs = self._sample(logits, settings, rows.num_generated[first])
        advance(
            tokens,
            logprobs,
            last_tokens=rows.last_tokens[first],
            positions=rows.positions[first],
            context_lens=rows.context_lens[first],
            num_generated=rows.num_generated[first],
            max_new=rows.max_new[first],
            min_new=rows.min_new[first],
            stop_ids=rows.stop_ids[first],
            alive=rows.alive[first],
            slots=rows.slots[first],
            page_table=rows.page_table[first],
            out_tokens=rows.out_tokens[:, first],
            out_logprobs=rows.out_logprobs[:, first],
            step_index=rows.step,
            page_tokens=self.cache.page_tokens,
        )

    def _prefill_hidden(
        self, batch: PrefillBatch, input_ids: Tensor, positions: Tensor, slots: Tensor, media: MediaInputs | None
    ) -> Tensor:
        page_table = self._uploaded(batch.page_table)
        attention = CudaPrefill.of_chunks(self.cache, page_table, batch.query_lens, batch.context_lens)
        return self._hidden(input_ids, positions, slots, attention, media)

    def _decode_hidden(self, num_rows: int) -> Tensor:
        rows = self.rows
        state = self.cache, rows.page_table[:num_rows], rows.context_lens[:num_rows]
        attention: PagedAttention = CudaPrefill.of_rows(*state) if self._deterministic else CudaDecode(*state)
        positions = self._decode_positions(num_rows)
        return self._hidden(rows.last_tokens[:num_rows], positions, rows.slots[:num_rows], attention)

    def _sample(self, logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions, temperature = positions.to(torch.int64), settings.temperature
        if not settings.needs.truncates:
            return sample_tokens(logits, settings.keys, positions, temperature)
        rows = settings.cut_rows
        if rows is None:  # looking them up would wait for the device, and rows without truncation cost little
            rows = torch.arange(len(logits), device=logits.device)
        filters = settings.top_k, settings.top_p, settings.min_p
        return sample_truncated(logits, settings.keys, positions, temperature, filters, rows)

    def _cut_places(self, new_rows: Sequence[NewRow]) -> Tensor | None:
        places = [place for place, each in enumerate(new_rows) if SamplingNeeds.of(each.sampling).truncates]
        return self._uploaded(np.array(places, np.int64))

    def _read(self, num_steps: int, rows: Tensor | slice) -> Output:
        def fetch(values: Tensor) -> Tensor:
            target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            return target.copy_(values, non_blocking=True)

        state = self.rows
        tokens = fetch(state.out_tokens[:num_steps, rows])
        logprobs = fetch(state.out_logprobs[:num_steps, rows])
        alive = fetch(state.alive[rows])
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return Output(tokens, logprobs, alive, ready)
