from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.data.tasks.countdown import countdown


def problem(row):
    truth = row["reward_model"]["ground_truth"]
    return tuple(sorted(truth["numbers"])), truth["target"]


@settings(max_examples=30, deadline=None)
@given(
    num_numbers=st.integers(2, 5),
    max_number=st.integers(15, 50),
    max_target=st.integers(50, 300),
    seed=st.integers(0, 99),
)
def test_every_demonstration_solves_its_problem(num_numbers, max_number, max_target, seed):
    rows = countdown("train", 10, seed, num_numbers=num_numbers, max_number=max_number, max_target=max_target)
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        expression = re.fullmatch(r"<answer>(.*)</answer>", row["extra_info"]["demonstration"]).group(1)
        assert eval(expression) == truth["target"]
        assert sorted(map(int, re.findall(r"\d+", expression))) == sorted(truth["numbers"])
        assert len(truth["numbers"]) == num_numbers
        assert all(1 <= number <= max_number for number in truth["numbers"])
        assert 1 <= truth["target"] <= max_target
        prompt = row["prompt"][0]["content"]
        assert f"equals {truth['target']}." in prompt
        assert f"numbers {', '.join(map(str, truth['numbers']))} exactly" in prompt


def test_splits_are_disjoint_and_rows_distinct():
    train = [problem(row) for row in countdown("train", 600, 0)]
    held_out = [problem(row) for row in countdown("eval", 150, 1)]
    assert len(set(train)) == 600
    assert len(set(held_out)) == 150
    assert not set(train) & set(held_out)


def test_deterministic_in_seed():
    assert countdown("train", 20, 5) == countdown("train", 20, 5)
    assert countdown("train", 20, 5) != countdown("train", 20, 6)


def test_too_many_rows():
    with pytest.raises(
        DataError, match=r"num_eval_rows = 500.*there seem to be only \d+ distinct eval problems.*max_number"
    ):
        countdown("eval", 500, 0, num_numbers=2, max_number=3)


@pytest.mark.parametrize("option", ["num_numbers", "max_number", "max_target"])
def test_bad_options_are_named(option):
    with pytest.raises(DataError, match=f"task countdown: data.task_args.{option} = 0: must be a whole number"):
        countdown("train", 1, 0, **{option: 0})
