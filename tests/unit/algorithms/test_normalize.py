"""Normalised rewards keep the places of turns, and their sums are the normalised scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headwater.algorithms.normalize import normalize, normalize_rewards

BY_GROUP = {"mean_level": "group", "std_level": "group", "leave_one_out": False, "unbiased": True, "epsilon": 0.0}


def normalized(rewards, columns, groups, **changed):
    given = torch.tensor(rewards), torch.tensor(columns)
    return normalize_rewards(*given, groups=torch.tensor(groups), **{**BY_GROUP, **changed})


def test_turns_are_divided_where_they_stand_and_the_mean_is_taken_off_the_last():
    """Scores 4 and 2 have mean 3 and a deviation of sqrt(2)."""
    made = normalized([[1.0, 3.0, 0.0], [0.0, 0.5, 1.5]], [1, 2], [0, 0])
    assert_close(made * 2**0.5, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, -1.5]]))


def test_scores_that_agree_leave_nothing_whatever_their_turns_are():
    """In float32 0.1 + 0.2 is not 0.3: that is no deviation to divide by."""
    made = normalized([[0.1, 0.2], [0.3, 0.0], [0.0, 5.0], [0.0, 7.0]], [1, 1, 1, 1], [0, 0, 1, 1], epsilon=1e-5)
    assert made[:2].abs().max() < 0.01
    assert made[2:].abs().min(dim=0).values.tolist() == pytest.approx([0.0, 0.5**0.5], rel=1e-4)


def test_what_is_alone_of_its_group_counts_for_nothing_in_any_turn():
    made = normalized([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [1, 1, 1], [0, 0, 1], std_level="none")
    assert made.tolist() == [[1.0, -3.0], [3.0, -1.0], [0.0, 0.0]]


def test_the_deviation_of_one_score_is_one_whatever_the_deviation_divides_by():
    scores, groups = torch.tensor([[1.0], [5.0], [2.0], [9.0]]), torch.arange(4)
    for unbiased in (True, False):
        changed = {"mean_level": "batch", "unbiased": unbiased}
        made = normalize_rewards(scores, torch.zeros(4, dtype=torch.long), groups=groups, **{**BY_GROUP, **changed})
        assert made[:, 0].tolist() == [-3.25, 0.75, -2.25, 4.75]


levels = st.sampled_from(("none", "batch", "group"))


@settings(deadline=None, max_examples=40)
@given(levels, levels, st.booleans(), st.booleans(), st.integers(0, 1000))
def test_the_sums_are_the_normalised_scores_and_proportions_stay(mean_level, std_level, leave_one_out, unbiased, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(8, 5, generator=generator)
    columns = torch.randint(1, 5, (8,), generator=generator)
    groups = torch.arange(8) // 4
    chosen = {"mean_level": mean_level, "std_level": std_level, "leave_one_out": leave_one_out, "unbiased": unbiased}
    made = normalize_rewards(rewards, columns, groups=groups, epsilon=1e-5, **chosen)
    assert_close(made.sum(dim=1), normalize(rewards.sum(dim=1), groups=groups, **chosen), atol=1e-4, rtol=1e-4)
    others = torch.ones_like(rewards).scatter(1, columns[:, None], 0.0) != 0
    factor = (made / rewards)[others].reshape(8, 4)
    assert_close(factor, factor[:, :1].expand(8, 4), rtol=1e-4, atol=0.0)
    assert (factor > 0).all()
