"""Attention on a CPU: ``CpuDecode`` and ``CpuPrefill`` for speed, ``BlockwiseAttention`` for deterministic results.

The fast implementations copy the pages of several sequences side by side and call torch's attention. A batch contains
sequences of similar length, padded to the longest, and uses a limited amount of memory. Neither time nor memory grows
with the number of sequences times the length of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headwater.engine.kv_cache import CPU_COPY_BYTES, CPU_MASK_BYTES, KVCache

_MASK_ITEM_BYTES = 8
"""Bytes per mask entry: one for the mask, up to three for intermediate results, four for torch's float mask."""


class CpuDecode:
    """Decoding: one query per sequence. Query heads that share a key head take the place of a prompt's positions."""

    def __init__(self, cache: KVCache, page_table: Tensor, context_lens: Tensor) -> None:
        # A row without work has no context. Letting it see slot 0 keeps its unused result finite.
        lengths = context_lens.to(torch.int64).clamp(min=1)
        num_pages = -(-lengths.numpy() // cache.page_tokens)
        self._batches = [
            (members, _PaddedRows(cache, page_table[members], lengths[members]))
            for members in _similar(num_pages, _most_pages(cache))
        ]

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        if len(self._batches) == 1:
            return self._batches[0][1].attend(layer, query, scale, window)
        output = torch.empty_like(query)
        for members, batch in self._batches:
            output[members] = batch.attend(layer, query[members], scale, window)
        return output


class CpuPrefill:
    """Packed chunks of prompts. Chunks of similar size are padded and computed together."""

    def __init__(
        self, cache: KVCache, page_table: Tensor, query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> None:
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        alike: dict[tuple[int, int], list[int]] = {}
        for place, (num_queries, num_keys) in enumerate(zip(query_lens, context_lens, strict=True)):
            # Grouping by powers of two limits padding to half of a batch, and limits the number of calls.
            alike.setdefault((num_queries.bit_length(), num_keys.bit_length()), []).append(place)
        most_pages = _most_pages(cache)
        self._batches = [
            _PaddedChunks(
                cache,
                page_table[members],
                starts[members],
                np.asarray(query_lens)[members],
                np.asarray(context_lens)[members],
            )
            for places in alike.values()
            for members in _pieces(
                places, max(-(-context_lens[each] // cache.page_tokens) for each in places), most_pages
            )
        ]

    def __call__(self, layer: int, query: Tensor, *, scale: float, window: int) -> Tensor:
        output = torch.empty_like(query)
        for batch in self._batches:
            batch.attend(layer, query, output, scale, window)
        return output


class _PaddedRows:
    def __init__(self, cache: KVCache, page_table: Tensor, lengths: Tensor) -> None:
        self._reader = _PageReader(cache, page_table, int(lengths.max()))
        self._places = torch.arange(self._reader.num_tokens)
        self._lengths = lengths[:, None]
        self._masks: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, scale: float, window: int) -> Tensor:
        keys, values, broken = self._reader.read(layer)
        grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
        if window not in self._masks:
            self._masks[window] = self._mask(window).to(query.dtype)
        return _attend(grouped, keys, values, self._masks[window], broken, scale).reshape(query.shape)

    def _mask(self, window: int) -> Tensor:
        """The mask that torch adds to the scores. From a boolean mask, torch would compute it again in every layer."""
        seen = self._places < self._lengths
        if window:
            seen &= self._places >= self._lengths - window
        return torch.where(seen, 0.0, -torch.inf)[:, None, None, :]


class _PaddedChunks:
    def __init__(
        self,
        cache: KVCache,
        page_table: Tensor,
        starts: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        context_lens: NDArray[np.int64],
    ) -> None:
        num_queries = int(query_lens.max())
        self._reader = _PageReader(cache, page_table, int(context_lens.max()))
        self._places = torch.arange(self._reader.num_tokens)
        offsets = np.arange(num_queries)
        self._present = torch.from_numpy(offsets[None, :] < query_lens[:, None])
        # A padded query repeats the last query of its chunk. Its result is discarded.
        clipped = np.minimum(offsets[None, :], query_lens[:, None] - 1)
        self._index = torch.from_numpy(starts[:, None] + clipped)
        self._positions = torch.from_numpy((context_lens - query_lens)[:, None] + clipped)
        # The masks need memory too, so only some queries of every chunk are computed at a time.
        bytes_per_query = len(page_table) * self._reader.num_tokens * _MASK_ITEM_BYTES
        self._num_at_once = max(1, CPU_MASK_BYTES // bytes_per_query)

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float, window: int) -> None:
        keys, values, broken = self._reader.read(layer)
        for start in range(0, self._index.shape[1], self._num_at_once):
            part = slice(start, start + self._num_at_once)
            index, present = self._index[:, part], self._present[:, part]
            positions = self._positions[:, None, part, None]
            seen = self._places <= positions
            if window:
                seen &= self._places > positions - window
            attended = _attend(query[index].transpose(1, 2), keys, values, seen, broken, scale)
            output[index[present]] = attended.transpose(1, 2)[present]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, broken: Tensor | None, scale: float) -> Tensor:
    """Attention to the keys that ``mask`` makes visible. ``broken`` tokens that are masked do not affect the result."""
    shares_keys = keys.shape[1] != query.shape[1]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=shares_keys)
    if broken is None:
        return output
    # For masked keys torch adds -inf to the scores and multiplies the values by zero. With NaN or infinity, both give
    # NaN. So broken tokens are replaced by zeros, and only a query that really sees one keeps the broken result.
    gone = broken[:, None, :, None]
    keys, values = keys.masked_fill(gone, 0), values.masked_fill(gone, 0)
    sound = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=shares_keys)
    seen = mask if mask.dtype == torch.bool else mask == 0
    return torch.where((seen & broken[:, None, None, :]).any(dim=-1, keepdim=True), output, sound)


def _most_pages(cache: KVCache) -> int:
    keys, _ = cache.layer(0)
    return CPU_COPY_BYTES // (2 * keys[0].nbytes)


def _similar(num_pages: NDArray[np.int64], most_pages: int) -> Iterator[Tensor | slice]:
    """Which sequences to read together: padding at most doubles their pages, up to ``most_pages`` if possible."""
    longest = int(num_pages.max())
    if len(num_pages) * longest <= 2 * int(num_pages.sum()):
        # The usual case, without a loop over sequences.
        at_once = max(1, most_pages // longest)
        yield from (slice(start, start + at_once) for start in range(0, len(num_pages), at_once))
        return
    # Grouping by powers of two limits padding to half of a batch, and limits the number of calls.
    classes = np.frexp(num_pages.astype(np.float64))[1]
    for each in np.unique(classes):
        members = np.flatnonzero(classes == each)
        at_once = max(1, most_pages // int(num_pages[members].max()))
        yield from torch.split(torch.from_numpy(members), at_once)


def _pieces(places: list[int], longest: int, most_pages: int) -> Iterator[list[int]]:
    at_once = max(1, most_pages // longest)
    return (places[start : start + at_once] for start in range(0, len(places), at_once))


class _PageReader:
    """Copies the pages of every sequence of a batch side by side, one layer at a time."""

    def __init__(self, cache: KVCache, page_table: Tensor, num_tokens: int) -> None:
        num_pages = max(1, -(-num_tokens // cache.page_tokens))
        self._cache = cache
        self._pages = page_table[:, :num_pages].to(torch.int64).flatten()
        self._num_sequences = len(page_table)
        self.num_tokens = num_pages * cache.page_tokens

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values as ``[sequences, kv heads, tokens, head dim]``, and which tokens are broken, if any.

        The returned tensors are valid until the next read.
        """
        keys, values = self._cache.read(layer, self._pages)
        shape = (self._num_sequences, self.num_tokens, *keys.shape[2:])
        broken = self._cache.broken_in(self._pages)
        return (
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            None if broken is None else broken.view(shape[:2]),
        )


class BlockwiseAttention:
    """Attention whose bits depend only on the query and its keys.

    Every query is computed separately, page by page from first to last, with a running softmax. The page size fixes
    the shapes of all products, so the batch cannot make a library choose another order of summation. ``page_table``
    and ``positions`` have one row per query, whichever sequence it belongs to.
    """

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
            # As long as no key is visible, both are -inf. Their difference must then mean "no rescaling".
            rescale = torch.exp(torch.where(new_highest == -torch.inf, 0.0, highest - new_highest))
            weights = torch.where(seen, torch.exp(scores - new_highest), 0.0)
            total = total * rescale + weights.sum(dim=-1, keepdim=True)
            if self._cache.has_broken:
                value = value.masked_fill(~seen.transpose(1, 2), 0)  # zero times NaN is NaN
            output = output * rescale + torch.bmm(weights, value)
            highest = new_highest
        return (output / total).view(num_queries, num_heads, head_dim)
