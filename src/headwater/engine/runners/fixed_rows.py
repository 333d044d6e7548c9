"""The deterministic runner of the CPU: a token's bits do not depend on what is computed beside it.

A matrix product gives a row the same bits wherever it stands, as long as the number of rows is the same; another number
may select another kernel. So every pass is made of blocks of exactly ``NUM_ROWS`` tokens, the last one padded, and
attention is computed query by query over fixed pages. Prefill, chunks, decode and recomputation then agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.engine.attention.blockwise import BlockwiseAttention
from headwater.engine.kv_cache import KVCache
from headwater.engine.plans import PrefillBatch
from headwater.engine.runners.plain import Runner
from headwater.engine.runners.row_blocks import NUM_ROWS, padded, sample_in_blocks
from headwater.engine.sampler import SamplingBatch


class FixedRowsRunner(Runner):
    def _prefill_hidden(self, batch: PrefillBatch, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        chunk_of_token = torch.repeat_interleave(torch.tensor(batch.query_lens))
        page_table = torch.from_numpy(batch.page_table)
        return self._in_blocks(input_ids, positions, slots, page_table[chunk_of_token])

    def _decode_hidden(self, num_rows: int) -> Tensor:
        rows = self.rows
        return self._in_blocks(
            rows.last_tokens[:num_rows], rows.positions[:num_rows], rows.slots[:num_rows], rows.page_table[:num_rows]
        )

    def _in_blocks(self, input_ids: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor) -> Tensor:
        # In order: a token of a prompt finds the keys of earlier blocks in the cache.
        hidden = []
        for start in range(0, len(input_ids), NUM_ROWS):
            block = slice(start, start + NUM_ROWS)
            # Padding writes to the scratch page and reads from it.
            ids, places, targets = (padded(each[block]) for each in (input_ids, positions, slots))
            attention = BlockwiseAttention(self.cache, padded(page_table[block]), places)
            hidden.append(self._hidden(ids, places, targets, attention)[: len(input_ids[block])])
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
        """Refuse to promise what this machine's libraries do not keep: the same token at two places of a block."""
        cache, self.cache = self.cache, KVCache(self.spec, NUM_ROWS + 1, self.cache.page_tokens)
        try:
            ids = torch.arange(NUM_ROWS) % min(self.spec.vocab_size, NUM_ROWS - 1)
            same = torch.equal(self._logits_alone(ids).roll(1, dims=0), self._logits_alone(ids.roll(1)))
        finally:
            self.cache = cache
        if not same:
            raise ModelError(
                "engine.deterministic = true: on this machine a token's result depends on its place in the batch, so "
                "the promise cannot be kept; set trainer.num_threads=1, or engine.deterministic=false"
            )

    def _logits_alone(self, ids: Tensor) -> Tensor:
        """Logits of one-token sequences, each with a page of its own."""
        pages = torch.arange(1, NUM_ROWS + 1)
        start = torch.zeros(NUM_ROWS, dtype=torch.int64)
        attention = BlockwiseAttention(self.cache, pages[:, None], start)
        return self._logits(self._hidden(ids, start, pages * self.cache.page_tokens, attention))
