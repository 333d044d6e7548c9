"""Attention whose bits depend on nothing but the query and its own keys.

Every query is computed by itself, over its keys in pages, from the first to the last, with a running softmax. The
shapes of all products are fixed by the page size, so no library can choose another order of summation by the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.engine.kv_cache import KVCache


class BlockwiseAttention:
    """``page_table`` and ``positions`` have one row per query, whichever sequence it belongs to (CPU layout)."""

    def __init__(self, cache: KVCache, page_table: Tensor, positions: Tensor) -> None:
        self._cache = cache
        self._positions = positions
        self._num_pages = int(positions.max()) // cache.page_tokens + 1
        self._pages = page_table[:, : self._num_pages].to(torch.int64)

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        keys, values = self._cache.layer(layer)
        num_queries, num_heads, head_dim = query.shape
        num_kv_heads, page_tokens = keys.shape[2], keys.shape[1]
        group = num_heads // num_kv_heads
        grouped = query.reshape(num_queries * num_kv_heads, group, head_dim) * scale
        highest = query.new_full((num_queries * num_kv_heads, group, 1), -torch.inf)
        total = torch.zeros_like(highest)
        output = torch.zeros_like(grouped)
        for page in range(self._num_pages):
            # [queries, tokens, kv heads, head dim] → one small product per query and key head.
            index = self._pages[:, page]
            key = keys[index].transpose(1, 2).reshape(-1, page_tokens, head_dim)
            value = values[index].transpose(1, 2).reshape(-1, page_tokens, head_dim)
            places = page * page_tokens + torch.arange(page_tokens)
            distance = self._positions[:, None] - places
            seen = distance >= 0
            if window:
                seen &= distance < window
            seen = seen[:, None, :].expand(-1, num_kv_heads, -1).reshape(-1, 1, page_tokens)
            scores = torch.bmm(grouped, key.transpose(1, 2)).masked_fill(~seen, -torch.inf)
            new_highest = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
            # Where nothing was seen yet both are -inf; their difference must count as "nothing to rescale".
            rescale = torch.exp(torch.where(new_highest == -torch.inf, 0.0, highest - new_highest))
            weights = torch.where(seen, torch.exp(scores - new_highest), 0.0)
            total = total * rescale + weights.sum(dim=-1, keepdim=True)
            if self._cache.has_broken:
                value = value.masked_fill(~seen.transpose(1, 2), 0)  # zero times NaN is NaN
            output = output * rescale + torch.bmm(weights, value)
            highest = new_highest
        return (output / total).view(num_queries, num_heads, head_dim)
