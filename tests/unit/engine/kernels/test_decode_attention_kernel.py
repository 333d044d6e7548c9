"""Decode attention over the paged cache."""

from __future__ import annotations

import torch
from cases import case
from engine.kernels.support import DEVICE, HALF, PagedCache, attend, randn

from headwater.engine.kernels.decode_attention import DecodeConfig, paged_decode_attention, suggest_num_splits


def run(
    cache: PagedCache, heads: int, dtype: torch.dtype, window: int = 0, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim = cache.k.shape[-1]
    q = randn(len(cache.lengths), heads, head_dim, dtype=dtype, seed=5)
    contexts = torch.tensor(cache.lengths, dtype=torch.int32, device=DEVICE)
    expected = [
        attend(q[row : row + 1], cache.keys[row], cache.values[row], 0.3, window=window)
        if cache.lengths[row]
        else torch.zeros_like(q[row : row + 1]).double()
        for row in range(len(q))
    ]
    actual = paged_decode_attention(q, cache.k, cache.v, cache.table, contexts, 0.3, window=window, **options)
    return actual.double(), torch.cat(expected)


def test_matches_a_float64_reference():
    for heads, kv_heads, head_dim, page_tokens, num_splits in [
        (12, 2, 128, 64, 1),
        (6, 2, 64, 16, 3),
        (2, 2, 24, 16, 1),
        (2, 2, 24, 64, 3),
    ]:
        with case(heads, kv_heads, head_dim, page_tokens, num_splits):
            cache = PagedCache([37, 1, 0, 80], kv_heads, head_dim, page_tokens, torch.float32)
            actual, expected = run(cache, heads, torch.float32, num_splits=num_splits)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_half_precision():
    cache = PagedCache([70, 33], 1, 64, 64, HALF)
    actual, expected = run(cache, 6, HALF, num_splits=2)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2)


def test_a_window():
    cache = PagedCache([90, 12, 0], 1, 32, 16, torch.float32)
    for window, num_splits in ((20, 1), (20, 2), (70, 2)):
        actual, expected = run(cache, 2, torch.float32, num_splits=num_splits, window=window)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_tiles_may_be_smaller_or_larger_than_a_page():
    cache = PagedCache([150, 63], 1, 32, 32, torch.float32)
    for block_n in (16, 128):
        actual, expected = run(cache, 4, torch.float32, num_splits=2, config=DecodeConfig(block_n, 4, 2))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_context_longer_than_one_run_of_page_ids():
    cache = PagedCache([16 * 33 + 5], 1, 16, 16, torch.float32)
    actual, expected = run(cache, 1, torch.float32, num_splits=1, config=DecodeConfig(16, 4, 2))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_others():
    cache = PagedCache([50, 129, 7], 2, 32, 16, torch.float32)
    q = randn(3, 4, 32, seed=3)
    contexts = torch.tensor(cache.lengths, dtype=torch.int32, device=DEVICE)

    def of(rows: slice) -> torch.Tensor:
        return paged_decode_attention(q[rows], cache.k, cache.v, cache.table[rows], contexts[rows], 0.2, num_splits=3)

    assert torch.equal(of(slice(0, 3))[1:2], of(slice(1, 2)))


def test_suggested_splits_fill_the_device_without_slivers():
    assert suggest_num_splits(rows=256, num_kv_heads=2, max_context=640) == 1
    assert suggest_num_splits(rows=8, num_kv_heads=2, max_context=640) == 10
    assert suggest_num_splits(rows=8, num_kv_heads=2, max_context=32) == 1
