"""Attention on CUDA: our Triton kernels over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headwater.engine.fused_decoder import HeadNorms, Rotary
from headwater.engine.kernels.decode_attention import (
    RotaryInputs,
    paged_decode_attention,
    rotary_decode_attention,
    split_counters,
    suggest_num_splits,
)
from headwater.engine.kernels.dependent_launch import supports_dependent_launch
from headwater.engine.kernels.prefetch import PagedReads, Soon, supports_prefetch
from headwater.engine.kernels.prefill_attention import (
    build_tiles,
    default_config,
    paged_prefill_attention,
    queries_per_tile,
)
from headwater.engine.kv_cache import KVCache

_TYPICAL_CONTEXT = 1024
_MAX_PREFETCHED_PAGES = 4


class CudaDecode:
    """One query per row; rows without work have no context. Every layer of a pass uses the same one, in order.

    ``dependent`` launches kernels before their predecessors have ended, where the device can; ``counts_splits`` lets
    the last split of a row combine them all, in place of a second launch. Up to ``prefetch_bytes`` of the next weight,
    and as much of the next layer's pages, are asked for early.
    """

    def __init__(
        self,
        cache: KVCache,
        page_table: Tensor,
        context_lens: Tensor,
        *,
        dependent: bool = True,
        counts_splits: bool = True,
        prefetch_bytes: int = 0,
    ) -> None:
        self._cache = cache
        self._page_table, self._context_lens = page_table, context_lens
        num_rows, num_kv_heads = len(context_lens), cache.spec.num_kv_heads
        self._num_splits = suggest_num_splits(num_rows, num_kv_heads, _TYPICAL_CONTEXT)
        self._dependent = dependent and supports_dependent_launch(context_lens.device)
        self._prefetch_bytes = prefetch_bytes if supports_prefetch(context_lens.device) else 0
        self._counters: Tensor | None = None
        if counts_splits and self._num_splits > 1:
            self._counters = split_counters(num_rows, num_kv_heads, context_lens.device)

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
            counters=self._counters,
            window=window,
            dependent=self._dependent,
        )

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Rotary,
        slots: Tensor,
        norms: HeadNorms | None,
        *,
        scale: float,
        window: int,
        then: Tensor | None = None,
    ) -> Tensor:
        """Rotate, store and attend in one launch."""
        keys, values = self._cache.layer(layer)
        inputs = RotaryInputs(
            rotary.cos,
            rotary.sin,
            rotary.positions,
            slots,
            q_norm=None if norms is None else norms.query,
            k_norm=None if norms is None else norms.key,
            eps=0.0 if norms is None else norms.eps,
        )
        return rotary_decode_attention(
            qkv,
            inputs,
            keys,
            values,
            self._page_table,
            self._context_lens,
            scale,
            num_heads=self._cache.spec.num_heads,
            num_splits=self._num_splits,
            counters=self._counters,
            window=window,
            dependent=self._dependent,
            soon=Soon(then, self._prefetch_bytes) if then is not None and self._prefetch_bytes else None,
        )

    def first_pages(self, layer: int) -> PagedReads | None:
        keys, values = self._cache.layer(layer)
        row_bytes = 2 * keys[0].numel() * keys.element_size()
        fitting = self._prefetch_bytes // (len(self._context_lens) * row_bytes)
        num_pages = min(fitting, _MAX_PREFETCHED_PAGES, self._page_table.shape[1])
        return PagedReads(keys, values, self._page_table, num_pages) if num_pages else None


class CudaPrefill:
    """Chunks of prompts, packed one after the other. Its results do not depend on how prompts are cut into chunks."""

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
        def upload(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int32)).pin_memory().to(cache.spec.device, non_blocking=True)

        tiles = build_tiles(query_lens, _queries_per_tile(cache))
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        return cls(cache, page_table, upload(tiles), upload(starts), upload(np.asarray(context_lens)))

    @classmethod
    def of_rows(cls, cache: KVCache, page_table: Tensor, context_lens: Tensor) -> CudaPrefill:
        """A decode step as chunks of one query each: the same bits as a prefill of the same tokens."""
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
