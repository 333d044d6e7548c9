"""Attention on CUDA, with Triton kernels over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headwater.engine.kernels.decode_attention import paged_decode_attention, suggest_num_splits
from headwater.engine.kernels.prefill_attention import (
    build_tiles,
    default_config,
    paged_prefill_attention,
    queries_per_tile,
)
from headwater.engine.kv_cache import KVCache
from headwater.engine.rows import upload

_TYPICAL_CONTEXT = 1024


class CudaDecode:
    """Decoding: one query per row. Rows without work have no context."""

    def __init__(self, cache: KVCache, page_table: Tensor, context_lens: Tensor) -> None:
        self._cache, self._page_table, self._context_lens = cache, page_table, context_lens
        self._num_splits = suggest_num_splits(len(context_lens), cache.spec.num_kv_heads, _TYPICAL_CONTEXT)

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        keys, values = self._cache.layer(layer)
        return paged_decode_attention(
            query,
            keys,
            values,
            self._page_table,
            self._context_lens,
            scale,
            num_splits=self._num_splits,
            window=window,
        )


class CudaPrefill:
    """Packed chunks of prompts. The results do not depend on how prompts are cut into chunks."""

    def __init__(
        self, cache: KVCache, page_table: Tensor, tiles: Tensor, query_starts: Tensor, context_lens: Tensor
    ) -> None:
        self._cache = cache
        self._page_table, self._tiles = page_table, tiles
        self._query_starts, self._context_lens = query_starts, context_lens

    @classmethod
    def of_chunks(
        cls, cache: KVCache, page_table: Tensor, query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> CudaPrefill:
        numbers = (
            build_tiles(query_lens, _queries_per_tile(cache)),
            np.concatenate([[0], np.cumsum(query_lens)]),
            np.asarray(context_lens),
        )
        tiles, starts, contexts = (
            upload(torch.from_numpy(each.astype(np.int32)), cache.spec.device) for each in numbers
        )
        return cls(cache, page_table, tiles, starts, contexts)

    @classmethod
    def of_rows(cls, cache: KVCache, page_table: Tensor, context_lens: Tensor) -> CudaPrefill:
        """A decode step as chunks of one query each, with the same bits as a prefill of the same tokens."""
        starts = torch.arange(len(context_lens) + 1, dtype=torch.int32, device=context_lens.device)
        tiles = torch.stack([starts[:-1], torch.zeros_like(starts[:-1])], dim=1)
        return cls(cache, page_table, tiles, starts, context_lens)

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        keys, values = self._cache.layer(layer)
        return paged_prefill_attention(
            query,
            keys,
            values,
            self._page_table,
            self._tiles,
            self._query_starts,
            self._context_lens,
            scale,
            window=window,
        )


def _queries_per_tile(cache: KVCache) -> int:
    spec = cache.spec
    return queries_per_tile(spec.num_heads, spec.num_kv_heads, default_config(spec.head_dim, spec.dtype.itemsize))
