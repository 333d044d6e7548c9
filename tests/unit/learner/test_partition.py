"""Sharing work out and packing it, whatever the lengths are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.learner.partition import pack, pack_evenly, partition, workload

examples = settings(deadline=None, max_examples=100)
lengths = st.lists(st.integers(1, 1000), min_size=1, max_size=48)


def sums(parts, sizes):
    return [sum(sizes[item] for item in part) for part in parts]


def items(parts):
    return sorted(item for part in parts for item in part)


@examples
@given(lengths, st.integers(1, 8))
def test_a_partition_holds_every_item_once(sizes, num_parts):
    num_parts = min(num_parts, len(sizes))
    parts = partition(sizes, num_parts)
    assert len(parts) == num_parts
    assert all(parts)
    assert items(parts) == list(range(len(sizes)))
    # One item decides at worst: moving the smallest of the fullest part to the emptiest would not even them out.
    totals = sums(parts, sizes)
    fullest = max(range(num_parts), key=lambda part: totals[part])
    assert len(parts[fullest]) == 1 or max(totals) - min(totals) <= max(sizes)


def test_the_optimum_that_differencing_misses():
    # Differencing alone ends at 14 and 16; one trade makes both 15.
    sizes = [8, 7, 6, 5, 4]
    assert sums(partition(sizes, 2), sizes) == [15, 15]


def test_attention_makes_long_sequences_dearer():
    assert workload(2000) > 2 * workload(1000)


def test_too_few_items_are_refused():
    with pytest.raises(DataError, match="cannot fill 3 parts"):
        partition([1, 2], 3)


@pytest.mark.parametrize("packing", [pack, pack_evenly])
@examples
@given(st.data())
def test_a_packing_keeps_to_its_limits(packing, data):
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=2, max_size=48))
    budget = data.draw(st.integers(max(sizes), 2 * sum(sizes)))
    min_bins = data.draw(st.integers(1, 2))
    bins = packing(sizes, budget, min_bins=min_bins)
    assert items(bins) == list(range(len(sizes)))
    assert all(bins)
    assert max(sums(bins, sizes)) <= budget
    assert len(bins) >= min_bins


@examples
@given(lengths, st.integers(1000, 3000))
def test_first_fit_leaves_at_most_one_bin_half_empty(sizes, budget):
    totals = sums(pack(sizes, budget), sizes)
    assert sum(total * 2 <= budget for total in totals) <= 1


@examples
@given(lengths, st.integers(1000, 3000))
def test_even_bins_are_never_more_than_those_of_first_fit(sizes, budget):
    assert len(pack_evenly(sizes, budget)) <= len(pack(sizes, budget))


def test_no_pass_is_spent_on_a_small_rest():
    sizes = [10, 9, 6, 5, 4, 3, 3]
    assert sums(pack(sizes, 20), sizes) == [19, 18, 3]
    assert sums(pack_evenly(sizes, 20), sizes) == [20, 20]


def test_a_rest_among_many_bins_stays():
    sizes = [10] * 200 + [1]
    assert pack_evenly(sizes, 20) == pack(sizes, 20)


def test_an_item_over_the_budget_names_itself_and_the_key():
    with pytest.raises(DataError, match=r"row 1 .*: 30 tokens, over the 20 tokens of a pass; raise learner.* to 30"):
        pack([10, 30], 20)


@pytest.mark.parametrize("packing", [pack, pack_evenly])
def test_more_bins_than_items_are_refused(packing):
    with pytest.raises(DataError, match="2 sequences cannot fill 4"):
        packing([1, 1], 10, min_bins=4)
