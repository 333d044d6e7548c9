"""Runs the model: chunks of prompts into the cache, and decode steps over the rows.

This is the plain runner, for the CPU and for reading: the model's layers with our attention, then sampling, then the
update of the rows. ``cuda`` and ``fixed_rows`` replace parts of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.engine.attention import PagedAttention, use_paged_attention
from headwater.engine.attention.cpu import CpuDecode, CpuPrefill
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec, can_fuse
from headwater.engine.plans import PrefillBatch, SamplingNeeds
from headwater.engine.rows import Rows
from headwater.engine.runners.decoder import DecoderOps, FusedDecoder
from headwater.engine.sampler import SamplingBatch, sample
from headwater.engine.upload import upload

_EARLY_END = 8
"""On a CPU a round of steps ends early once one in so many rows has finished: it would only compute for nothing."""


@dataclass(frozen=True)
class Output:
    """What some steps drew, ``[steps, rows]``; -1 where a row was dead. On CUDA it arrives after it was asked for."""

    tokens: Tensor
    logprobs: Tensor
    alive: Tensor
    ready: Any = None

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.tokens.numpy(), self.logprobs.numpy(), self.alive.numpy()


class Runner:
    """One model, its cache and its rows on one device."""

    def __init__(
        self, model: Any, spec: ModelSpec, cache: KVCache, rows: Rows, ops: DecoderOps, *, fused: bool = True
    ) -> None:
        use_paged_attention(model)
        self._decoder = model.get_decoder()
        # Fewer, larger operations where the architecture allows; transformers' own layers otherwise.
        self._fused = FusedDecoder(model, spec, ops) if fused and can_fuse(model.config) else None
        self._ops = ops
        self._head = model.get_output_embeddings()
        self.spec = spec
        self.cache = cache
        self.rows = rows

    def use_device(self) -> None:
        """Called once by the thread that runs everything else: which device is current is a thread's own affair."""

    def bucket_of(self, num_rows: int) -> int:
        """How many rows are computed when ``num_rows`` are in use."""
        return num_rows

    def forget_addresses(self) -> None:
        """Weights or cache are about to move; whatever remembers where they were must forget it."""

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> Output | None:
        """Compute the chunks; where a prompt is complete, its rows start and draw their first token."""
        input_ids, positions, slots = map(self._uploaded, (batch.input_ids, batch.positions, batch.slots))
        hidden = self._prefill_hidden(batch, input_ids, positions, slots)
        if not batch.new_rows:
            return None
        sources, targets = batch.copied_pages
        if len(sources):
            self.cache.copy_pages(self._uploaded(sources.astype(np.int64)), self._uploaded(targets.astype(np.int64)))
        rows = self.rows.admit(batch.new_rows)
        self.rows.step.zero_()
        # The samples of a prompt share its last hidden state; the head is applied once per prompt.
        last, member_of = np.unique(np.asarray(batch.new_row_tokens), return_inverse=True)
        logits = self._logits(hidden[self._uploaded(last)])
        self._draw(logits[self._uploaded(member_of)], rows, batch.needs)
        return self._read(1, rows)

    @torch.inference_mode()
    def decode(self, num_rows: int, num_steps: int, needs: SamplingNeeds) -> Output:
        """Up to ``num_steps`` tokens for each of the first rows."""
        self.rows.step.zero_()
        self.rows.refresh_slots(num_rows, self.cache.page_tokens)
        num_alive = int(self.rows.alive[:num_rows].sum())
        num_made = 0
        while num_made < num_steps:
            self._decode_step(num_rows, needs)
            num_made += 1
            num_finished = num_alive - int(self.rows.alive[:num_rows].sum())
            if num_finished * _EARLY_END >= num_alive:
                break
        return self._read(num_made, slice(0, num_rows))

    def _decode_step(self, num_rows: int, needs: SamplingNeeds) -> None:
        rows = self.rows
        hidden = self._decode_hidden(num_rows)
        self._draw(self._logits(hidden), torch.arange(num_rows, device=rows.device), needs)

    def _prefill_hidden(self, batch: PrefillBatch, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        attention = CpuPrefill(self.cache, torch.from_numpy(batch.page_table), batch.query_lens, batch.context_lens)
        return self._hidden(input_ids, positions, slots, attention)

    def _decode_hidden(self, num_rows: int) -> Tensor:
        rows = self.rows
        attention = CpuDecode(self.cache, rows.page_table[:num_rows], rows.context_lens[:num_rows])
        return self._hidden(rows.last_tokens[:num_rows], rows.positions[:num_rows], rows.slots[:num_rows], attention)

    def _hidden(self, input_ids: Tensor, positions: Tensor, slots: Tensor, attention: PagedAttention) -> Tensor:
        """Last hidden states ``[tokens, hidden]`` of tokens that know their position and their slot in the cache."""
        if self._fused is not None:
            return self._fused(input_ids, positions, slots, attention, self.cache)
        output = self._decoder(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            paged_attention=attention,
            kv_cache=self.cache,
            slots=slots,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._ops.linear(hidden, self._head.weight, self._head.bias)

    def _draw(self, logits: Tensor, rows: Tensor, needs: SamplingNeeds) -> None:
        """Draw a token for each of ``rows`` and let the rows take it."""
        if needs.has_minimum:
            logits = self.rows.forbid_early_stops(logits, rows)
        positions = self.rows.num_generated[rows].to(torch.int64)
        tokens, logprobs = self._sample(logits, self.rows.sampling(rows, needs), positions)
        self.rows.advance(rows, tokens, logprobs, self.cache.page_tokens)

    def _sample(self, logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        return sample(logits, settings, positions)

    def _read(self, num_steps: int, rows: Tensor | slice) -> Output:
        # Clones: the next steps write to the same places.
        state = self.rows
        return Output(
            state.out_tokens[:num_steps, rows].clone(),
            state.out_logprobs[:num_steps, rows].clone(),
            state.alive[rows].clone(),
        )

    def _uploaded(self, values: NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(values), self.spec.device)
