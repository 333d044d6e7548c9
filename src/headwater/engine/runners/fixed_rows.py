"""The deterministic runner of the CPU: a token's bits do not depend on what is computed beside it.

A matrix product gives a row the same bits wherever it stands, as long as the number of rows is the same; another number
may select another kernel. So every pass is made of blocks of exactly ``NUM_ROWS`` tokens, the last one padded, and
attention is computed query by query over fixed pages. Prefill, chunks, decode and recomputation then agree bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.engine.attention.blockwise import BlockwiseAttention
from headwater.engine.kv_cache import KVCache
from headwater.engine.plans import PrefillBatch
from headwater.engine.runners.plain import Runner
from headwater.engine.sampler import SamplingBatch

NUM_ROWS = 64


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
            ids, places, targets = (_padded(each[block]) for each in (input_ids, positions, slots))
            attention = BlockwiseAttention(self.cache, _padded(page_table[block]), places)
            hidden.append(self._hidden(ids, places, targets, attention)[: len(input_ids[block])])
        return torch.cat(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        blocks = [
            super(FixedRowsRunner, self)._logits(_padded(block))[: len(block)]
            for block in torch.split(hidden, NUM_ROWS)
        ]
        return torch.cat(blocks)

    def _sample(self, logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
        drawn = []
        for start in range(0, len(logits), NUM_ROWS):
            block = slice(start, start + NUM_ROWS)
            part = settings.map(lambda column, block=block: _padded(column[block]))  # type: ignore[misc]
            tokens, logprobs = super()._sample(_padded(logits[block]), part, _padded(positions[block]))
            count = len(logits[block])
            drawn.append((tokens[:count], logprobs[:count]))
        tokens, logprobs = (torch.cat(each) for each in zip(*drawn, strict=True))
        return tokens, logprobs

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


def _padded(block: Tensor) -> Tensor:
    """``NUM_ROWS`` rows; the added ones are zeros, which write to the scratch page and read from it."""
    missing = NUM_ROWS - block.shape[0]
    return F.pad(block, (0, 0) * (block.dim() - 1) + (0, missing)) if missing else block
