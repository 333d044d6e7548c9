"""The deterministic runner for a CPU: a token's bits do not depend on what else is in the batch.

Libraries choose an algorithm by shape and alignment. A matrix product gives a row the same bits at any position as long
as the number of rows is the same. So every pass consists of blocks of exactly ``NUM_ROWS`` tokens, with the last block
and the vocabulary padded, and attention is computed query by query over fixed pages. Prefill, chunks, decoding and
recomputation then agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.engine.attention.cpu import BlockwiseAttention
from headwater.engine.kv_cache import KVCache
from headwater.engine.media import MediaInputs
from headwater.engine.plans import PrefillBatch
from headwater.engine.runners.plain import Runner
from headwater.engine.sampler import SamplingBatch, put_rows, sample_cut, sample_uncut

NUM_ROWS = 64
_NUM_CUT_ROWS = 16
"""Rows per block of those that are truncated. Sorting is slow and often few rows need it."""
_VOCABULARY_MULTIPLE = 256


def padded(block: Tensor, num_rows: int = NUM_ROWS) -> Tensor:
    """``block`` with rows of zeros added up to ``num_rows`` rows."""
    missing = num_rows - block.shape[0]
    return F.pad(block, (0, 0) * (block.dim() - 1) + (0, missing)) if missing else block


def sample_in_blocks(logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``sample`` in blocks: a row's token and log-prob have the same bits whatever other rows there are."""
    drawn = _in_blocks(sample_uncut, NUM_ROWS, logits, settings, positions)
    if settings.needs.truncates:
        rows = settings.truncated_rows()
        if len(rows):
            cut = sample_cut_in_blocks(logits[rows], settings.of_rows(rows), positions[rows])
            drawn = put_rows(drawn, rows, cut)
    return drawn


def sample_cut_in_blocks(logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``sample_cut`` in blocks. The whole vocabulary is sorted, because neighbours must not decide how much is."""
    settings = replace(settings, needs=replace(settings.needs, is_wide=True))
    return _in_blocks(partial(sample_cut, may_look=False), _NUM_CUT_ROWS, logits, settings, positions)


def _in_blocks(
    draw: Callable[[Tensor, SamplingBatch, Tensor], tuple[Tensor, Tensor]],
    num_rows: int,
    logits: Tensor,
    settings: SamplingBatch,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    missing = -logits.shape[1] % _VOCABULARY_MULTIPLE
    drawn = []
    for start in range(0, len(logits), num_rows):
        block = slice(start, start + num_rows)
        rows = logits[block]
        if missing:
            rows = F.pad(rows, (0, missing), value=-torch.inf)  # tokens that are never sampled
        part = settings.map(lambda column, block=block: padded(column[block], num_rows))  # type: ignore[misc]
        tokens, logprobs = draw(padded(rows, num_rows), part, padded(positions[block], num_rows))
        drawn.append((tokens[: len(rows)], logprobs[: len(rows)]))
    tokens, logprobs = (torch.cat(each) for each in zip(*drawn, strict=True))
    return tokens, logprobs


class FixedRowsRunner(Runner):
    """``Runner`` in blocks of a fixed number of tokens."""

    def _prefill_hidden(
        self, batch: PrefillBatch, input_ids: Tensor, positions: Tensor, slots: Tensor, media: MediaInputs | None
    ) -> Tensor:
        chunk_of_token = torch.repeat_interleave(torch.tensor(batch.query_lens))
        page_table = torch.from_numpy(batch.page_table)
        return self._in_blocks(input_ids, positions, slots, page_table[chunk_of_token], positions, media)

    def _decode_hidden(self, num_rows: int) -> Tensor:
        rows = self.rows
        return self._in_blocks(
            rows.last_tokens[:num_rows],
            rows.positions[:num_rows],
            rows.slots[:num_rows],
            rows.page_table[:num_rows],
            self._decode_positions(num_rows),
        )

    def _in_blocks(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        page_table: Tensor,
        rotary: Tensor,
        media: MediaInputs | None = None,
    ) -> Tensor:
        # In order: the tokens of a prompt need the keys of earlier blocks in the cache.
        hidden = []
        for start in range(0, len(input_ids), NUM_ROWS):
            block = slice(start, start + NUM_ROWS)
            # Padding reads from and writes to the scratch page.
            ids, places, targets, angles = (padded(each[block]) for each in (input_ids, positions, slots, rotary))
            attention = BlockwiseAttention(self.cache, padded(page_table[block]), places)
            own_media = None if media is None else media.of_block(start, min(block.stop, len(input_ids)), NUM_ROWS)
            computed = self._hidden(ids, angles, targets, attention, own_media)
            hidden.append(computed[: len(input_ids[block])])
        return torch.cat(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        blocks = [
            super(FixedRowsRunner, self)._logits(padded(block))[: len(block)] for block in torch.split(hidden, NUM_ROWS)
        ]
        return torch.cat(blocks)

    def _sample(self, logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        return sample_in_blocks(logits, settings, positions)

    @torch.inference_mode()
    def check(self) -> None:
        """Raise ``ModelError`` if this machine's libraries give a token different bits at two positions of a block."""
        cache, self.cache = self.cache, KVCache(self.spec, NUM_ROWS + 1, self.cache.page_tokens)
        try:
            ids = torch.arange(NUM_ROWS) % min(self.spec.vocab_size, NUM_ROWS - 1)
            same = torch.equal(self._logits_alone(ids).roll(1, dims=0), self._logits_alone(ids.roll(1)))
        finally:
            self.cache = cache
        if not same:
            raise ModelError(
                "engine.deterministic = true: on this machine a token's result depends on its position in the batch; "
                "set trainer.num_threads=1, or engine.deterministic=false"
            )

    def _logits_alone(self, ids: Tensor) -> Tensor:
        """Logits of one-token sequences, each in a separate page."""
        pages = torch.arange(1, NUM_ROWS + 1)
        start = torch.zeros(NUM_ROWS, dtype=torch.int64)
        attention = BlockwiseAttention(self.cache, pages[:, None], start)
        return self._logits(self._hidden(ids, start, pages * self.cache.page_tokens, attention))
