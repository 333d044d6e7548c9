"""Built-in scorers on answers that are right, wrong and strange."""

from __future__ import annotations

import pytest

from headwater.data.tasks.countdown import countdown as countdown_rows
from headwater.data.tasks.reasoning_gym import reasoning_gym as gym_rows
from headwater.rewards.scorers.arithmetic import arithmetic
from headwater.rewards.scorers.countdown import countdown
from headwater.rewards.scorers.gsm8k import gsm8k
from headwater.rewards.scorers.reasoning_gym import reasoning_gym


@pytest.mark.parametrize(
    ("text", "score"), [("46", 1.0), (" 46\n", 1.0), ("47", 0.0), ("046", 0.0), ("46 apples", 0.0), ("", 0.0)]
)
def test_arithmetic(text, score):
    assert arithmetic("arithmetic", text, "46", {}) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>(2+3)*4</answer>", 1.0),
        ("<answer>4*(3+2) = 20</answer>", 1.0),
        ("no tags: (2+3)*4", 0.0),
        ("<answer>2+3+4</answer>", 0.1),
        ("<answer>4*5</answer>", 0.1),
        ("<answer>20</answer>", 0.1),
        ("<answer>2*3*4-4</answer>", 0.1),
        ("<answer>first</answer> then <answer>(3+2)*4</answer>", 1.0),
        ("<answer>__import__('os').system('true')</answer>", 0.0),
        ("<answer>2**99999999</answer>", 0.0),
        ("<answer>4/(2-2)</answer>", 0.0),
        ("<answer>" + "(" * 5000 + "</answer>", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_countdown(text, score):
    truth = {"target": 20, "numbers": [2, 3, 4]}
    assert countdown("countdown", text, truth, {})["score"] == score


def test_countdown_accepts_every_demonstration():
    for row in countdown_rows("train", 50, 0):
        text, truth = row["extra_info"]["demonstration"], row["reward_model"]["ground_truth"]
        assert countdown("countdown", text, truth, {})["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "truth", "method", "score"),
    [
        ("so it is\n#### 1,234", "1234", "strict", 1.0),
        ("#### $18", "18", "strict", 1.0),
        ("#### 18.0", "18", "strict", 1.0),
        ("#### -3", "-3", "strict", 1.0),
        ("first #### 1 and then #### 18", "18", "strict", 1.0),
        ("the answer is 18", "18", "strict", 0.0),
        ("the answer is 18.", "18", "flexible", 1.0),
        ("18 or 19", "18", "flexible", 0.0),
        ("", "18", "flexible", 0.0),
    ],
)
def test_gsm8k(text, truth, method, score):
    assert gsm8k("gsm8k", text, truth, {}, method=method) == score


def test_reasoning_gym_scores_its_own_answers():
    for row in gym_rows("train", 5, 0, "leg_counting"):
        demonstration = row["extra_info"]["demonstration"]
        assert reasoning_gym(row["data_source"], demonstration, None, row["extra_info"]) == 1.0
        assert reasoning_gym(row["data_source"], "<answer>-1</answer>", None, row["extra_info"]) < 1.0
