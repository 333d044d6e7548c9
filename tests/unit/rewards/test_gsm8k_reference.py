"""All reference answers of GSM8K's test set are right, and none is right after a change."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from headwater.rewards.scorers.gsm8k import gsm8k

FILE = Path(__file__).parents[2] / "data" / "gsm8k_test_answers.jsonl.xz"


def test_reference_answers():
    with lzma.open(FILE, "rt", encoding="utf-8") as file:
        answers = [json.loads(line) for line in file]
    right = changed = 0
    for answer in answers:
        work, _, number = answer.rpartition("####")
        number = number.strip()
        truth = number.replace(",", "")
        right += gsm8k("openai/gsm8k", answer, truth, {}) == 1.0
        right += gsm8k("openai/gsm8k", f"{work}So it is {number}.", truth, {}, method="flexible") == 1.0
        value = int(truth)
        others = [str(value + 1), str(value - 1), f"{value * 10 + 10}", f"{value}.5", f"{-value - 1}", "", "none"]
        for other in others:
            changed += gsm8k("openai/gsm8k", f"{work}#### {other}", truth, {}) != 0.0
        changed += gsm8k("openai/gsm8k", f"{work}{number}", truth, {}) != 0.0
        changed += gsm8k("openai/gsm8k", f"{answer}\n#### {value + 7}", truth, {}) != 0.0
    assert (len(answers), right, changed) == (1319, 2 * 1319, 0)


def test_a_wrong_number_in_the_right_place_may_be_worth_something():
    assert gsm8k("gsm8k", "#### 4", "5", {}, format_score=0.1) == 0.1
    assert gsm8k("gsm8k", "4", "5", {}, format_score=0.1) == 0.0
