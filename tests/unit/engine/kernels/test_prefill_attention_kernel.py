"""Prefill attention over the paged cache. Its bits depend only on the query and its keys."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import DEVICE, HALF, PagedCache, attend, randn

from headwater.engine.kernels.prefill_attention import (
    PrefillConfig,
    build_tiles,
    default_config,
    paged_prefill_attention,
    queries_per_tile,
)

SCALE = 0.25


def run(
    cache: PagedCache, chunks: list[tuple[int, int, torch.Tensor]], config: PrefillConfig | None = None, window: int = 0
) -> torch.Tensor:
    """Attend with chunks of (row of the cache, context length, queries), packed in this order."""
    q = torch.cat([queries for _, _, queries in chunks])
    lengths = [len(queries) for _, _, queries in chunks]
    config = config or default_config(q.shape[-1], q.element_size())
    tiles = build_tiles(lengths, queries_per_tile(q.shape[1], cache.k.shape[1], config))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor([context for _, context, _ in chunks], dtype=torch.int32, device=DEVICE)
    table = cache.table[[row for row, _, _ in chunks]]
    return paged_prefill_attention(
        q,
        cache.k,
        cache.v,
        table,
        torch.from_numpy(tiles).to(DEVICE),
        starts,
        contexts,
        SCALE,
        window=window,
        config=config,
    )


def test_matches_a_float64_reference():
    for heads, kv_heads, head_dim, page, window in [(6, 1, 64, 64, 0), (4, 2, 24, 16, 0), (4, 2, 24, 16, 9)]:
        with case(heads, kv_heads, head_dim, page, window):
            cache = PagedCache([40, 3, 70], kv_heads, head_dim, page, torch.float32)
            chunks = [
                (row, cache.lengths[row], randn(n, heads, head_dim, seed=row)) for row, n in ((0, 40), (1, 1), (2, 30))
            ]
            actual = run(cache, chunks, window=window)
            expected = [attend(q, cache.keys[row], cache.values[row], SCALE, window=window) for row, _, q in chunks]
            torch.testing.assert_close(actual.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_half_precision():
    cache = PagedCache([40], 2, 64, 64, HALF)
    q = randn(40, 6, 64, dtype=HALF)
    actual = run(cache, [(0, 40, q)])
    torch.testing.assert_close(actual.double(), attend(q, cache.keys[0], cache.values[0], SCALE), rtol=2e-2, atol=1e-2)


def test_whole_chunked_and_single_token_prefill_agree_bit_for_bit():
    for dtype, window in [(torch.float32, 21), (HALF, 0)]:
        with case(dtype, window):
            length, heads = 50, 3
            cache = PagedCache([length, 20], 1, 32, 16, dtype)
            q = randn(length, heads, 32, dtype=dtype, seed=1)
            other = randn(20, heads, 32, dtype=dtype, seed=2)
            whole = run(cache, [(0, length, q)], window=window)
            beside = run(cache, [(1, 20, other), (0, length, q)], window=window)[20:]
            assert torch.equal(whole, beside)
            ends = [13, 14, 45, 50]
            pieces = [(0, end, q[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
            assert torch.equal(whole, run(cache, pieces, window=window))
            singles = [(0, end, q[end - 1 : end]) for end in range(1, length + 1, 9)]
            assert torch.equal(whole[::9], run(cache, singles, window=window))


def test_tiles_of_chunks():
    assert build_tiles([5, 0, 2], 4).tolist() == [[0, 0], [0, 4], [2, 0]]
    assert build_tiles([], 4).shape == (0, 2)


def test_padded_tiles_do_nothing():
    cache = PagedCache([10], 1, 32, 16, torch.float32)
    q = randn(10, 2, 32)
    config = default_config(32, 4)
    tiles = torch.tensor([[0, 0], [-1, 0]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 10], dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor([10], dtype=torch.int32, device=DEVICE)
    out = paged_prefill_attention(q, cache.k, cache.v, cache.table, tiles, starts, contexts, SCALE, config=config)
    torch.testing.assert_close(out.double(), attend(q, cache.keys[0], cache.values[0], SCALE), rtol=1e-5, atol=1e-5)
