"""The quickstart's task."""

from __future__ import annotations

import pytest

from headwater.core.errors import DataError
from headwater.data.tasks.largest_digit import largest_digit


def numbers(rows) -> list[str]:
    return [row["prompt"][0]["content"].removeprefix("Largest of ").removesuffix("?") for row in rows]


def test_rows_ask_for_the_largest_digit():
    for row, number in zip(rows := largest_digit("train", 100, 0), numbers(rows), strict=True):
        assert row["reward_model"]["ground_truth"] == max(number)
        assert row["extra_info"]["demonstration"] == max(number)


def test_any_digit_shows_the_form_of_an_answer_but_not_the_rule():
    rows = largest_digit("train", 1000, 0, num_digits=6, demonstrations="any_digit")
    shown = [(row["extra_info"]["demonstration"], number) for row, number in zip(rows, numbers(rows), strict=True)]
    assert all(digit in number for digit, number in shown)
    assert sum(digit == max(number) for digit, number in shown) < 300


def test_splits_never_share_digits_in_any_order():
    train, held_out = numbers(largest_digit("train", 2000, 0)), numbers(largest_digit("eval", 500, 0))
    assert not {"".join(sorted(number)) for number in train} & {"".join(sorted(number)) for number in held_out}


def test_rows_depend_on_the_seed_alone():
    assert largest_digit("train", 50, 3) == largest_digit("train", 50, 3)
    assert largest_digit("train", 50, 3) != largest_digit("train", 50, 4)
    assert len(set(numbers(largest_digit("train", 500, 0)))) == 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_digits": 1}, r"num_digits = 1: must be a whole number >= 2"),
        ({"demonstrations": "wrong"}, "demonstrations = 'wrong': must be one of right, any_digit"),
        ({"num_digits": 2, "num_rows": 101}, r"only \d+ distinct train problems.*raise data\.task_args\.num_digits"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(DataError, match=message):
        largest_digit("train", **{"num_rows": 10, "seed": 0, **options})
