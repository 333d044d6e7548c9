"""Runs the model: computes chunks of prompts into the cache, and decode steps over the rows.

This is the plain runner for a CPU: the model's layers with paged attention, then sampling, then the update of the
rows. ``cuda`` and ``fixed_rows`` replace parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.engine.attention import PagedAttention, use_paged_attention
from headwater.engine.attention.cpu import CpuDecode, CpuPrefill
from headwater.engine.guides import Guidance
from headwater.engine.kv_cache import KVCache
from headwater.engine.media import MediaEncoder, MediaInputs
from headwater.engine.model_spec import ModelSpec, can_fuse
from headwater.engine.plans import NewRow, PrefillBatch
from headwater.engine.rows import DecodeRows, upload
from headwater.engine.runners.decoder import DecoderOps, FusedDecoder
from headwater.engine.sampler import SamplingBatch, SamplingNeeds, distribution, put_rows, sample
from headwater.models.precision import has_wide_logits

_SCORED_VALUES = 2**24
"""How many log-probs of prompts are in memory at the same time: positions times vocabulary."""
_EARLY_END = 8
"""On a CPU a round ends early once one in this many rows has finished, to avoid computing finished rows."""


@dataclass(frozen=True)
class Output:
    """The output of some steps, ``[steps, rows]``; -1 where a row had stopped. On CUDA it is copied asynchronously."""

    tokens: Tensor
    logprobs: Tensor
    alive: Tensor
    ready: Any = None
    top: tuple[Tensor, Tensor] | None = None
    """Tokens and log-probs of the alternatives, ``[guided rows, alternatives]``."""

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.tokens.numpy(), self.logprobs.numpy(), self.alive.numpy()


class Runner:
    """A model with its cache and rows on one device."""

    def __init__(
        self, model: Any, spec: ModelSpec, cache: KVCache, rows: DecodeRows, ops: DecoderOps, *, fused: bool = True
    ) -> None:
        use_paged_attention(model)
        self._decoder = model.get_decoder()
        # Fewer, larger operations if the architecture allows it; otherwise the layers of transformers.
        is_fused = fused and can_fuse(model.config.get_text_config())
        self._fused = FusedDecoder(model, spec, ops) if is_fused else None
        self._ops = ops
        self._head = model.get_output_embeddings()
        self._has_wide_logits = has_wide_logits(spec.dtype)
        self.spec = spec
        self.cache = cache
        self.rows = rows
        self.media: MediaEncoder | None = None
        """For a model with a vision tower."""

    def use_device(self) -> None:
        """Called once by the engine's thread: the current device and stream are properties of the thread."""

    def synchronize(self) -> None:
        """Wait until everything that the engine's thread has queued on the device has run."""

    def callers_stream(self) -> Any:
        """The stream on which the calling thread works; None on a CPU."""
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Work on another thread's stream, after all work of the engine that is queued and before all that follows."""
        return nullcontext()

    def bucket_of(self, num_rows: int) -> int:
        """The number of rows that are computed when ``num_rows`` are in use."""
        return num_rows

    def weight_views(self) -> list[Tensor]:
        """Tensors other than the model's parameters that share memory with them."""
        return list(self._fused.merged_weights()) if self._fused is not None else []

    def forget_media(self) -> None:
        """Called when the weights have changed."""
        if self.media is not None:
            self.media.forget()

    def forget_addresses(self) -> None:
        """Called before weights or cache move: discard everything that depends on their addresses."""

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, guidance: Guidance | None = None) -> Output | None:
        """Compute the chunks. Rows of complete prompts start and sample their first token."""
        input_ids, positions, slots = map(self._uploaded, (batch.input_ids, batch.positions, batch.slots))
        hidden = self._prefill_hidden(batch, input_ids, positions, slots, self._media_inputs(batch))
        if not batch.new_rows:
            return None
        sources, targets = batch.copied_pages
        if len(sources):
            self.cache.copy_pages(sources.astype(np.int64), targets.astype(np.int64))
        rows = self.rows.admit(batch.new_rows)
        self.rows.step.zero_()
        # The samples of a prompt share its last hidden state, so the head is applied once per prompt.
        last, member_of = np.unique(np.asarray(batch.new_row_tokens), return_inverse=True)
        logits = self._logits(hidden[self._uploaded(last)])
        settings = self.rows.sampling(rows, batch.needs, self._cut_places(batch.new_rows))
        top = self._draw(logits[self._uploaded(member_of)], rows, settings, guidance)
        return replace(self._read(1, rows), top=top)

    @torch.inference_mode()
    def score(self, batch: PrefillBatch, targets: NDArray[np.int64], num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of ``targets``, which follow the tokens of ``batch``, and the most likely tokens at their places.

        They are those of the model's own distribution, at temperature 1. Nothing is sampled.
        """
        input_ids, positions, slots = map(self._uploaded, (batch.input_ids, batch.positions, batch.slots))
        hidden = self._prefill_hidden(batch, input_ids, positions, slots, self._media_inputs(batch))
        num_rows = max(1, _SCORED_VALUES // self.spec.vocab_size)
        scored = []
        blocks = torch.split(hidden, num_rows), torch.split(self._uploaded(targets), num_rows)
        for block, wanted in zip(*blocks, strict=True):
            logprobs = self._logits(block).float().log_softmax(dim=-1)
            top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
            scored.append((logprobs.gather(-1, wanted[:, None])[:, 0], top.indices, top.values))
        own, top_tokens, top_logprobs = (torch.cat(each).cpu() for each in zip(*scored, strict=True))
        return own, top_tokens, top_logprobs

    @torch.inference_mode()
    def decode(
        self,
        num_rows: int,
        num_steps: int,
        needs: SamplingNeeds,
        cut_rows: NDArray[np.int64] | None = None,
        guidance: Guidance | None = None,
    ) -> Output:
        """Generate up to ``num_steps`` tokens for each of the first ``num_rows`` rows.

        ``cut_rows`` are the rows whose distribution is truncated. With ``guidance``, one token is generated.
        """
        self.rows.step.zero_()
        self.rows.refresh_slots(num_rows, self.cache.page_tokens)
        if guidance is not None:
            return self._guided_step(num_rows, needs, guidance)
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
        rows = torch.arange(num_rows, device=self.rows.device)
        self._draw(self._logits(self._decode_hidden(num_rows)), rows, self.rows.sampling(rows, needs))

    def _guided_step(self, num_rows: int, needs: SamplingNeeds, guidance: Guidance) -> Output:
        rows = torch.arange(num_rows, device=self.rows.device)
        top = self._draw(self._decode_logits(num_rows), rows, self.rows.sampling(rows, needs), guidance)
        return replace(self._read(1, slice(0, num_rows)), top=top)

    def _decode_logits(self, num_rows: int) -> Tensor:
        return self._logits(self._decode_hidden(num_rows))

    def _media_inputs(self, batch: PrefillBatch) -> MediaInputs | None:
        if batch.media is None:
            return None
        assert self.media is not None, "a request with media is only accepted by a model with a vision tower"
        return self.media.inputs(batch.media)

    def _prefill_hidden(
        self, batch: PrefillBatch, input_ids: Tensor, positions: Tensor, slots: Tensor, media: MediaInputs | None
    ) -> Tensor:
        attention = CpuPrefill(self.cache, torch.from_numpy(batch.page_table), batch.query_lens, batch.context_lens)
        return self._hidden(input_ids, positions, slots, attention, media)

    def _decode_hidden(self, num_rows: int) -> Tensor:
        rows = self.rows
        attention = CpuDecode(self.cache, rows.page_table[:num_rows], rows.context_lens[:num_rows])
        positions = self._decode_positions(num_rows)
        return self._hidden(rows.last_tokens[:num_rows], positions, rows.slots[:num_rows], attention)

    def _decode_positions(self, num_rows: int) -> Tensor:
        """The rotary positions of the rows' last tokens."""
        positions = self.rows.positions[:num_rows]
        return positions + self.rows.rotary_shift[:num_rows] if self.spec.uses_grid else positions

    def _hidden(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: PagedAttention,
        media: MediaInputs | None = None,
    ) -> Tensor:
        """Last hidden states ``[tokens, hidden]`` of tokens with given rotary positions and cache slots."""
        if self._fused is not None:
            return self._fused(input_ids, positions, slots, attention, self.cache, media)
        output = self._decoder(
            **({"input_ids": input_ids[None]} if media is None else _embedded(self._decoder, input_ids, media)),
            position_ids=positions[None] if media is None or media.rotary is None else media.rotary[:, None],
            use_cache=False,
            paged_attention=attention,
            kv_cache=self.cache,
            slots=slots,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        product = self._ops.wide_linear if self._has_wide_logits else self._ops.linear
        return product(hidden, self._head.weight, self._head.bias)

    def _draw(
        self, logits: Tensor, rows: Tensor, settings: SamplingBatch, guidance: Guidance | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Sample a token for each of ``rows`` and update the rows. Returns the alternatives of guided rows."""
        if settings.needs.has_minimum:
            logits = self.rows.forbid_early_stops(logits, rows)
        positions = self.rows.num_generated[rows].to(torch.int64)
        drawn, top = self._sample(logits, settings, positions), None
        if guidance is not None:
            guided = self._uploaded(guidance.rows)
            own_logits, own_settings = guidance.adjust(logits[guided]), settings.of_rows(guided)
            drawn = put_rows(drawn, guided, self._sample(own_logits, own_settings, positions[guided]))
            if guidance.num_top:
                likely = distribution(own_logits, own_settings).topk(guidance.num_top, dim=-1)
                top = likely.indices.cpu(), likely.values.cpu()
        self.rows.advance(rows, *drawn, self.cache.page_tokens)
        return top

    def _cut_places(self, new_rows: Sequence[NewRow]) -> Tensor | None:
        """The places of rows whose distribution is truncated. ``None`` where looking them up costs nothing."""
        return None

    def _sample(self, logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        return sample(logits, settings, positions)

    def _read(self, num_steps: int, rows: Tensor | slice) -> Output:
        # Clone, because the next steps write to the same tensors.
        state = self.rows
        return Output(
            state.out_tokens[:num_steps, rows].clone(),
            state.out_logprobs[:num_steps, rows].clone(),
            state.alive[rows].clone(),
        )

    def _uploaded(self, values: NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(values), self.spec.device)


def _embedded(decoder: Any, input_ids: Tensor, media: MediaInputs) -> dict[str, Any]:
    """Arguments for a decoder of transformers: embeddings in which media have replaced their tokens."""
    embeddings = decoder.embed_tokens(input_ids)
    embeddings[media.places] = media.embeddings.to(embeddings.dtype)
    if not media.deep:
        return {"inputs_embeds": embeddings[None]}
    stands_for_media = torch.zeros_like(input_ids, dtype=torch.bool)
    stands_for_media[media.places] = True
    return {
        "inputs_embeds": embeddings[None],
        "visual_pos_masks": stands_for_media[None],
        "deepstack_visual_embeds": list(media.deep),
    }
