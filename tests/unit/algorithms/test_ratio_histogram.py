"""Percentiles from counts that add up, against sorting all tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.algorithms.diagnostics import count_ratios, percentiles_of, ratio_percentiles

NAMES = ["ratio_p01", "ratio_p10", "ratio_p50", "ratio_p90", "ratio_p99"]


def percentiles(*log_ratios: float) -> dict[str, float]:
    values = torch.tensor([log_ratios])
    return percentiles_of(count_ratios(values, torch.ones_like(values)))


def test_eleven_ratios_by_hand():
    """Ratios 0.5 to 1.5 in tenths: the tenth per cent is the second of the eleven, the ninetieth the last but one."""
    found = percentiles(*(math.log(0.5 + tenth / 10) for tenth in range(11)))
    assert list(found) == NAMES
    assert list(found.values()) == pytest.approx([0.5, 0.6, 1.0, 1.4, 1.5], rel=0.005)


def test_a_policy_that_has_not_moved_has_ratios_of_exactly_one():
    assert percentiles(0.0, 0.0, 0.0) == dict.fromkeys(NAMES, 1.0)


def test_small_moves_are_told_from_none():
    found = percentiles(-1e-4, -1e-5, 0.0, 1e-5, 1e-4)
    logs = [math.log(each) for each in found.values()]
    assert logs == pytest.approx([-1e-4, -1e-4, 0.0, 1e-4, 1e-4], abs=5e-6)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=60), st.integers(0, 60))
def test_parts_add_up_and_agree_with_sorting(log_ratios, cut):
    values = torch.tensor([log_ratios], dtype=torch.float32)
    mask = torch.ones_like(values)
    counts = count_ratios(values, mask)
    assert torch.equal(
        count_ratios(values[:, :cut], mask[:, :cut]) + count_ratios(values[:, cut:], mask[:, cut:]), counts
    )
    sorted_ones = ratio_percentiles(values, mask)
    for name, found in percentiles_of(counts).items():
        expected = math.log(sorted_ones[name])
        assert math.log(found) == pytest.approx(expected, rel=0.006, abs=1e-5)


def test_masked_tokens_and_nan_are_not_counted_and_infinities_are_at_the_ends():
    values = torch.tensor([[float("nan"), 3.0, 0.0, float("inf"), float("-inf")]])
    counts = count_ratios(values, torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0]]))
    assert counts.sum() == 3
    logs = {name: math.log(value) for name, value in percentiles_of(counts).items()}
    assert [logs["ratio_p01"], logs["ratio_p50"], logs["ratio_p99"]] == pytest.approx([-20, 0, 20], rel=0.006)


def test_nothing_counted_shows_nothing():
    values = torch.zeros(2, 3)
    assert percentiles_of(count_ratios(values, torch.zeros_like(values))) == {}
