from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.data.tasks import TASKS
from headwater.data.tasks.arithmetic import arithmetic


def questions(rows):
    return [row["prompt"][0]["content"] for row in rows]


def test_row_has_verl_layout():
    (row,) = arithmetic("train", 1, 0)
    question = row["prompt"][0]["content"]
    first, second = map(int, re.fullmatch(r"(\d+)\+(\d+)=", question).groups())
    assert row == {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "arithmetic",
        "reward_model": {"ground_truth": str(first + second)},
        "extra_info": {"index": 0, "split": "train", "demonstration": str(first + second)},
    }


def test_words_style():
    (row,) = arithmetic("train", 1, 0, style="words", operations=["-"])
    assert re.fullmatch(r"What is \d+ - \d+\?", row["prompt"][0]["content"])


@settings(max_examples=40, deadline=None)
@given(
    operations=st.lists(st.sampled_from("+-*"), min_size=1, unique=True),
    num_operands=st.integers(2, 4),
    low=st.integers(0, 50),
    seed=st.integers(0, 10**6),
)
def test_answers_are_right_and_operands_in_range(operations, num_operands, low, seed):
    options = {"operations": operations, "num_operands": num_operands, "min_operand": low, "max_operand": low + 40}
    rows = arithmetic("train", 20, seed, **options)
    for row in rows:
        expression = row["prompt"][0]["content"].removesuffix("=")
        numbers = list(map(int, re.findall(r"\d+", expression)))
        assert str(eval(expression)) == row["reward_model"]["ground_truth"]
        assert len(numbers) == num_operands
        assert all(low <= number <= low + 40 for number in numbers)
        assert set(re.findall(r"[^\d]", expression)) <= set(operations)
    assert len(set(questions(rows))) == 20


@pytest.mark.parametrize("max_operand", [19, 9999])
def test_splits_share_no_problem_even_turned_round_and_with_other_seeds(max_operand):
    train = questions(arithmetic("train", 250, 0, max_operand=max_operand))
    held_out = questions(arithmetic("eval", 60, 7, max_operand=max_operand))

    def both_ways(question):
        first, second = question.removesuffix("=").split("+")
        return {f"{first}+{second}=", f"{second}+{first}="}

    assert not set(held_out) & {turned for question in train for turned in both_ways(question)}


def test_splits_together_cover_the_whole_space():
    with pytest.raises(DataError) as caught:
        arithmetic("train", 1000, 0, max_operand=9)
    num_train = int(re.search(r"only (\d+) distinct", str(caught.value)).group(1))
    with pytest.raises(DataError) as caught:
        arithmetic("eval", 1000, 0, max_operand=9)
    num_eval = int(re.search(r"only (\d+) distinct", str(caught.value)).group(1))
    assert num_train + num_eval == 100
    every = arithmetic("train", num_train, 0, max_operand=9) + arithmetic("eval", num_eval, 3, max_operand=9)
    assert len(set(questions(every))) == 100


def test_seed_decides_the_rows_in_every_process():
    script = "from headwater.data.tasks.arithmetic import arithmetic; print(arithmetic('eval', 5, 3, max_operand=999))"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] == f"{arithmetic('eval', 5, 3, max_operand=999)}\n"


@pytest.mark.parametrize("max_operand", [9, 9999])
def test_seeds_differ_in_small_and_large_spaces(max_operand):
    first, second = (questions(arithmetic("train", 30, seed, max_operand=max_operand)) for seed in (3, 4))
    assert set(first) != set(second)


def test_too_many_rows_says_how_many_exist_and_what_to_raise():
    with pytest.raises(
        DataError, match=r"data.num_train_rows = 300.*there are only \d+ distinct.*task_args.max_operand"
    ):
        arithmetic("train", 300, 0, max_operand=9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"style": "prose"}, "style = 'prose'"),
        ({"operations": ["/"]}, "operations"),
        ({"operations": []}, "operations"),
        ({"operations": ["+", "+"]}, "operations"),
        ({"operations": 3}, "operations"),
        ({"num_operands": 1}, "num_operands = 1"),
        ({"max_operand": "99"}, "max_operand = '99'"),
        ({"min_operand": 5, "max_operand": 4}, "max_operand = 4"),
        ({"min_operand": -1}, "min_operand = -1"),
        ({"min_operand": True}, "min_operand = True"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(DataError, match=f"task arithmetic: data.task_args.{named}"):
        arithmetic("train", 1, 0, **options)


def test_registered_under_its_file_name():
    assert TASKS.resolve("arithmetic") is arithmetic
    assert TASKS.names() == [
        "arithmetic",
        "calculator",
        "countdown",
        "gsm8k",
        "humaneval",
        "largest_digit",
        "reasoning_gym",
        "shapes",
    ]
