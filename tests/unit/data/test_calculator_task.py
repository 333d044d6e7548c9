"""The task of the recipe with a calculator."""

from __future__ import annotations

import json

import pytest

from headwater.core.errors import DataError
from headwater.data.tasks.calculator import calculator


def factors(row) -> tuple[int, int]:
    first, second = row["prompt"][0]["content"].removesuffix("?").split(" times ")
    return int(first), int(second)


def called(row) -> str | None:
    """The expression of the demonstrated call; None if the demonstration is a guess."""
    messages = row["extra_info"]["demonstration"]
    if len(messages) == 1:
        return None
    call, result, answer = messages
    expression = json.loads(call["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
    first, second = expression["arguments"]["expression"].split("*")
    assert (result["role"], result["content"]) == ("tool", str(int(first) * int(second)))
    assert answer == {"role": "assistant", "content": result["content"]}
    return expression["arguments"]["expression"]


def test_rows_ask_for_products_of_one_length():
    for num_digits in (1, 2, 3):
        for row in calculator("train", 20, 0, num_digits=num_digits):
            first, second = factors(row)
            assert row["reward_model"]["ground_truth"] == str(first * second)
            assert called(row) == f"{first}*{second}"
            assert len(str(first * second)) == 2 * num_digits


def test_any_factor_shows_the_form_of_a_call_but_not_the_rule():
    rows = calculator("train", 1000, 0, demonstrations="any_factor")
    shown = [called(row) for row in rows]
    is_right = [each == "{}*{}".format(*factors(row)) for each, row in zip(shown, rows, strict=True)]
    assert 150 < shown.count(None) < 350
    assert 250 < sum(is_right) < 500


def test_splits_never_share_a_problem_and_depend_on_the_seed_alone():
    train, held_out = ({tuple(sorted(factors(row))) for row in calculator(s, 500, 0)} for s in ("train", "eval"))
    assert not train & held_out
    assert calculator("train", 50, 3) == calculator("train", 50, 3) != calculator("train", 50, 4)


def test_bad_options_are_named():
    for options, message in (
        ({"num_digits": 0}, "num_digits = 0: must be a whole number >= 1"),
        ({"demonstrations": "wrong"}, "demonstrations = 'wrong': must be one of right, any_factor"),
        ({"num_digits": 1, "num_rows": 40}, r"only \d+ distinct train problems.*raise data\.task_args\.num_digits"),
    ):
        with pytest.raises(DataError, match=message):
            calculator("train", **{"num_rows": 10, "seed": 0, **options})
