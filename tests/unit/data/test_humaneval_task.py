"""The HumanEval task."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.core.errors import DataError
from headwater.data.tasks.humaneval import humaneval
from headwater.rewards.programs.cases import read_cases

FOLDER = str(Path(__file__).parents[2] / "data")


def test_rows_have_the_tests_of_the_published_problems():
    rows = humaneval("eval", 164, 0, folder=FOLDER)
    assert len(rows) == 164
    first = rows[0]
    assert first["prompt"][0]["content"].startswith("Complete this Python function.")
    assert "def has_close_elements(numbers" in first["prompt"][0]["content"]
    assert first["data_source"] == "humaneval"
    cases = read_cases(first["reward_model"]["ground_truth"], first["extra_info"])
    assert (cases.entry, len(cases)) == ("has_close_elements", 1)
    some = humaneval("eval", 5, 1, folder=FOLDER)
    assert some == humaneval("eval", 5, 1, folder=FOLDER) != humaneval("eval", 5, 2, folder=FOLDER)


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(DataError, match=r"no problems for training; use it in data\.eval only"):
        humaneval("train", 1, 0, folder=FOLDER)
    with pytest.raises(DataError, match="must name a folder"):
        humaneval("eval", 1, 0)
    with pytest.raises(DataError, match=r"has no HumanEval\.jsonl\.gz"):
        humaneval("eval", 1, 0, folder=str(tmp_path))
    with pytest.raises(DataError, match=r"set data\.num_eval_rows to at most 164"):
        humaneval("eval", 165, 0, folder=FOLDER)
    (tmp_path / "HumanEval.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match=r"HumanEval\.jsonl:1: not a HumanEval row"):
        humaneval("eval", 1, 0, folder=str(tmp_path))
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        humaneval("eval", 1, 0, folder=str(tmp_path))
