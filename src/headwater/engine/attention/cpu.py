"""Attention on the CPU: read the pages of every sequence side by side, then torch's own attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.engine.kv_cache import KVCache


class CpuDecode:
    """One query per sequence. The query heads that share a key head stand where a prompt's positions would."""

    def __init__(self, cache: KVCache, page_table: Tensor, context_lens: Tensor) -> None:
        self._reader = _PageReader(cache, page_table, int(context_lens.max()))
        self._places = torch.arange(self._reader.num_tokens)
        # A row without work has no context; letting it see slot 0 keeps its unused result finite.
        self._lengths = context_lens.to(torch.int64).clamp(min=1)[:, None]
        self._full = (self._places < self._lengths)[:, None, None, :]

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        num_rows, num_heads, head_dim = query.shape
        keys, values = self._reader.read(layer)
        grouped = query.reshape(num_rows, keys.shape[1], -1, head_dim)
        mask = self._full
        if window:
            mask = mask & (self._places >= self._lengths - window)[:, None, None, :]
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return output.reshape(num_rows, num_heads, head_dim)


class CpuPrefill:
    """Chunks of prompts, packed one after the other. Chunks of similar size are padded and computed together."""

    def __init__(
        self, cache: KVCache, page_table: Tensor, query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> None:
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        batches: dict[tuple[int, int], list[int]] = {}
        for place, (num_queries, num_keys) in enumerate(zip(query_lens, context_lens, strict=True)):
            # Powers of two bound the padding to half, and the number of calls to a few.
            batches.setdefault((num_queries.bit_length(), num_keys.bit_length()), []).append(place)
        self._batches = [
            _PaddedChunks(
                cache,
                page_table[members],
                starts[members],
                np.asarray(query_lens)[members],
                np.asarray(context_lens)[members],
            )
            for members in batches.values()
        ]

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        output = torch.empty_like(query)
        for batch in self._batches:
            batch.attend(layer, query, output, scale, window)
        return output


class _PaddedChunks:
    def __init__(
        self, cache: KVCache, page_table: Tensor, starts: np.ndarray, query_lens: np.ndarray, context_lens: np.ndarray
    ) -> None:
        num_queries = int(query_lens.max())
        self._reader = _PageReader(cache, page_table, int(context_lens.max()))
        offsets = np.arange(num_queries)
        self._present = torch.from_numpy(offsets[None, :] < query_lens[:, None])
        # A padded query repeats its chunk's last one, and its result is dropped.
        clipped = np.minimum(offsets[None, :], query_lens[:, None] - 1)
        self._index = torch.from_numpy(starts[:, None] + clipped)
        positions = torch.from_numpy((context_lens - query_lens)[:, None] + clipped)
        self._distance = positions[:, None, :, None] - torch.arange(self._reader.num_tokens)

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float, window: int) -> None:
        keys, values = self._reader.read(layer)
        mask = self._distance >= 0
        if window:
            mask &= self._distance < window
        padded = query[self._index].transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            padded, keys, values, attn_mask=mask, scale=scale, enable_gqa=keys.shape[1] != padded.shape[1]
        )
        output[self._index[self._present]] = attended.transpose(1, 2)[self._present]


class _PageReader:
    """Copies the pages of every sequence side by side, layer by layer, into the same memory."""

    def __init__(self, cache: KVCache, page_table: Tensor, num_tokens: int) -> None:
        num_pages = max(1, -(-num_tokens // cache.page_tokens))
        self._cache = cache
        self._pages = page_table[:, :num_pages].to(torch.int64).flatten()
        self.num_tokens = num_pages * cache.page_tokens
        keys, _ = cache.layer(0)
        # One piece of memory for the whole pass: asking the system for it again at each layer costs more than the copy.
        self._copies = [keys.new_empty((len(self._pages), *keys.shape[1:])) for _ in range(2)]
        self._shape = (len(page_table), self.num_tokens, *keys.shape[2:])

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as ``[sequences, kv heads, tokens, head dim]``, valid until the next call."""
        for pages, copy in zip(self._cache.layer(layer), self._copies, strict=True):
            torch.index_select(pages, 0, self._pages, out=copy)
        keys, values = (copy.view(self._shape).transpose(1, 2) for copy in self._copies)
        return keys, values
