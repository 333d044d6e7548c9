"""Sharing work out and packing it, whatever the lengths are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.learner.partition import pack, pack_evenly, partition, partition_groups, workload

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


@examples
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 6))
def test_equal_sizes_are_equal(sizes, num_parts):
    sizes = sizes * num_parts
    parts = partition(sizes, num_parts, equal_sizes=True)
    assert items(parts) == list(range(len(sizes)))
    assert {len(part) for part in parts} == {len(sizes) // num_parts}


def test_the_optimum_that_differencing_misses():
    # Differencing alone ends at 14 and 16; one trade makes both 15.
    sizes = [8, 7, 6, 5, 4]
    assert sums(partition(sizes, 2), sizes) == [15, 15]


@examples
@given(st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 4))
def test_groups_stay_whole(members, num_parts):
    members = members * num_parts
    groups = [number for number, each in enumerate(members) for _ in each]
    parts = partition_groups([length for each in members for length in each], groups, num_parts)
    assert items(parts) == list(range(len(groups)))
    in_parts = [{groups[row] for row in part} for part in parts]
    assert {len(each) for each in in_parts} == {len(members) // num_parts}
    assert sum(len(each) for each in in_parts) == len(members)


def test_attention_makes_long_sequences_dearer():
    assert workload(2000) > 2 * workload(1000)


def test_too_few_items_are_refused():
    with pytest.raises(DataError, match="cannot fill 3 parts"):
        partition([1, 2], 3)
    with pytest.raises(DataError, match="same count"):
        partition([1, 2, 3], 2, equal_sizes=True)


@pytest.mark.parametrize("packing", [pack, pack_evenly])
@examples
@given(st.data())
def test_a_packing_keeps_to_its_limits(packing, data):
    group_size = data.draw(st.integers(1, 3))
    multiple_of = data.draw(st.integers(1, 3))
    num_groups = data.draw(st.integers(2 * multiple_of, 24))
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=num_groups * group_size, max_size=num_groups * group_size))
    budget = max(sum(sizes[start : start + group_size]) for start in range(0, len(sizes), group_size))
    budget += data.draw(st.integers(sum(sizes) // multiple_of, 2 * sum(sizes)))
    min_bins = data.draw(st.integers(1, 2 * multiple_of))
    bins = packing(sizes, budget, min_bins=min_bins, multiple_of=multiple_of, group_size=group_size)
    assert items(bins) == list(range(len(sizes)))
    assert all(bins)
    assert max(sums(bins, sizes)) <= budget
    assert len(bins) >= min_bins
    assert len(bins) % multiple_of == 0
    owner = {row: number for number, each in enumerate(bins) for row in each}
    assert all(owner[row] == owner[row - row % group_size] for row in owner)


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
    with pytest.raises(
        DataError, match=r"row 1 .*: 30 tokens, over learner.max_tokens_per_microbatch = 20; raise it to 30"
    ):
        pack([10, 30], 20)
    with pytest.raises(DataError, match=r"rows 2-3 .*: 30 tokens, over learner\.max_tokens_per_microbatch = 20"):
        pack_evenly([5, 5, 15, 15], 20, group_size=2)


@pytest.mark.parametrize("packing", [pack, pack_evenly])
def test_more_bins_than_items_are_refused(packing):
    with pytest.raises(DataError, match="2 sequences cannot fill 4"):
        packing([1, 1], 10, min_bins=4)


def test_incomplete_groups_are_refused():
    with pytest.raises(DataError, match="groups of 2"):
        pack([1, 1, 1], 10, group_size=2)
