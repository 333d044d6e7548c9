"""Decode attention over the paged cache."""

from __future__ import annotations

import pytest
import torch
from engine.kernels.support import DEVICE, HALF, PagedCache, attend, randn

from headwater.engine.kernels.decode_attention import (
    DecodeConfig,
    RotaryInputs,
    paged_decode_attention,
    rotary_decode_attention,
    split_counters,
    suggest_num_splits,
)
from headwater.engine.kernels.rope import rope_and_store


def run(cache: PagedCache, heads: int, dtype: torch.dtype, **options) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim = cache.k.shape[-1]
    q = randn(len(cache.lengths), heads, head_dim, dtype=dtype, seed=5)
    contexts = torch.tensor(cache.lengths, dtype=torch.int32, device=DEVICE)
    reference = {name: options[name] for name in ("window", "softcap") if name in options}
    expected = [
        attend(q[row : row + 1], cache.keys[row], cache.values[row], 0.3, **reference)
        if cache.lengths[row]
        else torch.zeros_like(q[row : row + 1]).double()
        for row in range(len(q))
    ]
    actual = paged_decode_attention(q, cache.k, cache.v, cache.table, contexts, 0.3, **options)
    return actual.double(), torch.cat(expected)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 2, 128), (9, 3, 64), (4, 4, 24)])
def test_matches_a_float64_reference(heads, kv_heads, head_dim, page_tokens, num_splits):
    cache = PagedCache([37, 1, 0, 64, 130], kv_heads, head_dim, page_tokens, torch.float32)
    actual, expected = run(cache, heads, torch.float32, num_splits=num_splits)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_last_split_can_combine_them_all():
    cache = PagedCache([37, 1, 0, 64, 130], 2, 32, 16, torch.float32)
    counters = split_counters(5, 2, DEVICE)
    config = DecodeConfig(16, 4, 2)
    for _ in range(2):
        actual, expected = run(cache, 12, torch.float32, num_splits=4, counters=counters, config=config)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert not counters.any(), "counters must be zero again for the next call"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 2, 64), (3, 3, 24)])
def test_rotary_in_one_launch_is_rope_and_store_and_then_attention(
    dtype, num_splits, normed, heads, kv_heads, head_dim
):
    cache = PagedCache([37, 1, 0, 65, 130, 64], kv_heads, head_dim, 16, dtype)
    qkv, rotary, contexts = rotary_inputs(cache, heads, dtype, normed=normed)
    expected_k, expected_v = cache.k.clone(), cache.v.clone()
    norms = rotary.q_norm, rotary.k_norm, rotary.eps
    query = rope_and_store(
        qkv, rotary.cos, rotary.sin, rotary.positions, rotary.slots, expected_k, expected_v, heads, *norms
    )
    expected = paged_decode_attention(
        query, expected_k, expected_v, cache.table, contexts, 0.3, num_splits=num_splits, window=50
    )
    config = DecodeConfig(16, 4, 2)
    actual = rotary_decode_attention(
        qkv, rotary, cache.k, cache.v, cache.table, contexts, 0.3,
        num_heads=heads, num_splits=num_splits, counters=split_counters(6, kv_heads, DEVICE), window=50, config=config,
    )  # fmt: skip
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype == HALF else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(actual, expected, **tolerance)
    assert not actual[2].any(), "a row without context yields zeros"
    # The dead row's slot is on the scratch page, where rope_and_store writes and this kernel does not.
    torch.testing.assert_close(cache.k[1:], expected_k[1:], equal_nan=True, **tolerance)
    assert torch.equal(cache.v[1:].nan_to_num(9.0), expected_v[1:].nan_to_num(9.0))
    assert cache.k[0].isnan().all()


def test_rotary_with_a_window_of_the_new_token_alone():
    cache = PagedCache([40, 33, 1], 1, 32, 16, torch.float32)
    qkv, rotary, contexts = rotary_inputs(cache, 2, torch.float32, normed=False)
    options = {"num_heads": 2, "window": 1, "config": DecodeConfig(16, 4, 2)}
    for num_splits in (1, 2):
        actual = rotary_decode_attention(
            qkv, rotary, cache.k, cache.v, cache.table, contexts, 0.3, num_splits=num_splits, **options
        )
        values = qkv.view(3, 4, 32)[:, 3:]
        torch.testing.assert_close(actual, values.expand_as(actual), rtol=1e-6, atol=1e-6)


def rotary_inputs(
    cache: PagedCache, heads: int, dtype: torch.dtype, *, normed: bool
) -> tuple[torch.Tensor, RotaryInputs, torch.Tensor]:
    """Inputs of a step whose tokens are the last ones of the rows; a row without context writes to slot 0."""
    head_dim, kv_heads = cache.k.shape[3], cache.k.shape[1]
    qkv = randn(len(cache.lengths), (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=3)
    contexts = torch.tensor(cache.lengths, dtype=torch.int32, device=DEVICE)
    positions = (contexts - 1).clamp(min=0).to(torch.int64)
    pages = cache.table.gather(1, positions[:, None] // cache.page_tokens)[:, 0]
    slots = torch.where(contexts > 0, pages * cache.page_tokens + positions % cache.page_tokens, 0)
    angles = torch.arange(200, device=DEVICE)[:, None] * 0.1 ** torch.arange(head_dim // 2, device=DEVICE)
    weights = [randn(head_dim, dtype=dtype, seed=seed) if normed else None for seed in (8, 9)]
    return qkv, RotaryInputs(angles.cos(), angles.sin(), positions, slots, *weights, 1e-6), contexts


def test_half_precision():
    cache = PagedCache([100, 33], 2, 64, 64, HALF)
    actual, expected = run(cache, 12, HALF, num_splits=2)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 5.0}, {"window": 70, "softcap": 2.0}])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_window_and_softcap(options, num_splits):
    cache = PagedCache([90, 12, 0], 1, 32, 16, torch.float32)
    actual, expected = run(cache, 2, torch.float32, num_splits=num_splits, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_n", [16, 128])
def test_tiles_may_be_smaller_or_larger_than_a_page(block_n):
    cache = PagedCache([150, 63], 1, 32, 32, torch.float32)
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
