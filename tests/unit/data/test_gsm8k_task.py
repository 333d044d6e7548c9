from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.core.errors import DataError
from headwater.data.tasks.gsm8k import gsm8k

EXCERPT = str(Path(__file__).parent / "gsm8k")


def published(name):
    return [json.loads(line) for line in (Path(EXCERPT) / name).read_text().splitlines()]


@pytest.mark.parametrize(("split", "name"), [("train", "train.jsonl"), ("eval", "test.jsonl")])
def test_rows_are_the_published_ones(split, name):
    rows = gsm8k(split, 20, 0, folder=EXCERPT)
    for index, (row, source) in enumerate(zip(rows, published(name), strict=True)):
        assert row["prompt"][0]["content"].startswith(source["question"].strip())
        assert '"####"' in row["prompt"][0]["content"]
        assert row["data_source"] == "gsm8k"
        assert row["reward_model"]["ground_truth"] == source["answer"].split("#### ")[1].replace(",", "")
        assert row["extra_info"]["index"] == index
        assert row["extra_info"]["split"] == split


def test_demonstration_has_no_calculator_marks():
    first = gsm8k("train", 20, 0, folder=EXCERPT)[0]
    assert first["extra_info"]["demonstration"] == (
        "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
    )
    assert first["reward_model"]["ground_truth"] == "72"


def test_commas_leave_the_ground_truth(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How many?", "answer": "Many.\n#### 1,234,567"}))
    assert gsm8k("train", 1, 0, folder=str(tmp_path))[0]["reward_model"]["ground_truth"] == "1234567"


def test_a_subset_is_chosen_by_seed_in_file_order():
    def indices(seed):
        return [row["extra_info"]["index"] for row in gsm8k("train", 8, seed, folder=EXCERPT)]

    assert indices(0) == sorted(indices(0)) == indices(0)
    assert indices(0) != indices(1)


def test_missing_folder_and_file_say_how_to_get_them(tmp_path):
    with pytest.raises(DataError, match=r"data.task_args.folder = ''.*github.com/openai/grade-school-math"):
        gsm8k("train", 1, 0)
    with pytest.raises(DataError, match=r"test.jsonl does not exist.*github.com/openai/grade-school-math"):
        gsm8k("eval", 1, 0, folder=str(tmp_path))


def test_more_rows_than_the_file_has():
    with pytest.raises(DataError, match=r"data.num_eval_rows = 21, but .*test.jsonl holds only 20"):
        gsm8k("eval", 21, 0, folder=EXCERPT)


@pytest.mark.parametrize("row", [{"question": "a"}, {"answer": "#### 1"}, {"question": "a", "answer": "1"}])
def test_a_row_of_another_kind_is_named(tmp_path, row):
    (tmp_path / "train.jsonl").write_text(f'{{"question": "q", "answer": "#### 1"}}\n\n{json.dumps(row)}\n')
    with pytest.raises(DataError, match=r"train.jsonl, line 3: not a GSM8K row"):
        gsm8k("train", 2, 0, folder=str(tmp_path))
