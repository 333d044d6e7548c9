from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from headwater.core.errors import DataError, UnknownName
from headwater.data.sources import FileSource, TaskSource, is_task, open_source, parse_source, task_labels
from headwater.data.tasks.arithmetic import arithmetic
from headwater.data.tasks.reasoning_gym import reasoning_gym

USER_TASK = """
def rows(split, num_rows, seed, *, word="hi"):
    return [{"prompt": f"{word} {split} {seed} {number}"} for number in range(num_rows)]

def anything(**options):
    return [{"prompt": str(sorted(options))}]

def not_rows(split, num_rows, seed):
    return {"prompt": "x"}

def lacks_seed(split, num_rows):
    return []

def none(split, num_rows, seed):
    return []

constant = 3
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_tasks.py"
    path.write_text(USER_TASK)
    return str(path)


def open_one(source, task_args=None, labels=None, num_rows=2):
    labels = task_labels([source]) if labels is None else labels
    (rows,) = open_source(source, split="train", num_rows=num_rows, seed=5, task_args=task_args or {}, labels=labels)
    return rows


def test_task_names():
    assert parse_source("arithmetic") == TaskSource("arithmetic", "arithmetic", arithmetic, None)
    gym = parse_source("reasoning_gym:chain_sum")
    assert gym == TaskSource("reasoning_gym:chain_sum", "reasoning_gym:chain_sum", reasoning_gym, "chain_sum")


def test_user_tasks(user_file, tmp_path, monkeypatch):
    rows = open_one(f"{user_file}:rows", {"word": "yo"})
    assert [rows[0], rows[1]] == [{"prompt": "yo train 5 0"}, {"prompt": "yo train 5 1"}]
    assert rows.name == "my_tasks:rows"
    monkeypatch.syspath_prepend(tmp_path)
    assert open_one("my_tasks:rows").name == "my_tasks:rows"
    assert open_one(f"{user_file}:anything", {"b": 1})[0]["prompt"] == "['b', 'num_rows', 'seed', 'split']"


def test_globs_are_sorted(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        (tmp_path / name).write_text('{"prompt": "x"}')
    assert parse_source(str(tmp_path / "*.jsonl")) == FileSource((tmp_path / "a.jsonl", tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match=r"\*.parquet': no file matches"):
        parse_source(str(tmp_path / "*.parquet"))


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    path = tmp_path / "rows[1].jsonl"
    path.write_text('{"prompt": "x"}')
    assert parse_source(str(path)) == FileSource((path,))


def test_files_are_told_from_tasks():
    for path in ("C:\\data\\rows.parquet", "rows.json", "a/b.jsonl"):
        assert parse_source(path) == FileSource((Path(path),))
        assert not is_task(path), path
    for text in ("arithmetic", "reasoning_gym:x", "my.module:rows", "tasks.py:rows"):
        assert is_task(text), text


def test_dataset_objects():
    rows = open_one(datasets.Dataset.from_list([{"prompt": "a", "n": [1]}, {"prompt": "b", "n": [2, 3]}]))
    assert len(rows) == 2
    assert rows[1] == {"prompt": "b", "n": [2, 3]}
    assert open_one([{"prompt": "a"}])[0] == {"prompt": "a"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list([{"a": 1}])}),
            r"several splits.*dataset\['train'\]",
        ),
        (datasets.Dataset.from_list([]), "has no rows"),
        (3, "type int: cannot be read"),
    ],
)
def test_bad_dataset_objects(source, message):
    with pytest.raises(DataError, match=message):
        open_one(source)


BAD_NAMES = [
    ("arithmatic", "neither a task nor a .*did you mean 'arithmetic'"),
    ("s3://bucket/rows.parquet", "pip install s3fs"),
    ("s3://bucket/rows.csv", "unknown kind of file"),
    ("nowhere://bucket/rows.json", "check what is before ://"),
    ("reasoning_gym:", "nothing follows the colon"),
]


def test_bad_names():
    for text, message in BAD_NAMES:
        with pytest.raises(DataError, match=message):
            parse_source(text)


def test_bad_paths(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"unknown kind of file; must end in .parquet/.jsonl/.json"):
        parse_source(str(tmp_path / "rows.csv"))


def test_user_task_errors(user_file):
    with pytest.raises(UnknownName, match="has no 'row'"):
        parse_source(f"{user_file}:row")
    with pytest.raises(DataError, match="is a int; name a function"):
        parse_source(f"{user_file}:constant")
    with pytest.raises(DataError, match="returned dict; a task returns a list"):
        open_one(f"{user_file}:not_rows")
    with pytest.raises(DataError, match="has no parameter 'seed'"):
        open_one(f"{user_file}:lacks_seed")
    with pytest.raises(DataError, match="none: has no rows"):
        open_one(f"{user_file}:none")


def test_task_arguments():
    with pytest.raises(DataError, match="'arithmetic:3': this task takes nothing after the colon; write 'arithmetic'"):
        open_one("arithmetic:3")
    with pytest.raises(DataError, match="'reasoning_gym': this task needs an argument"):
        open_one("reasoning_gym")


def test_unknown_option_names_the_nearest():
    message = r"data.task_args.max_operands = 3; did you mean 'max_operand'.*data.task_args.zzz = 'a'; "
    with pytest.raises(DataError, match=message):
        open_one("arithmetic", {"max_operands": 3, "zzz": "a"})


def test_options_for_one_task_alone():
    labels = task_labels(["arithmetic", "countdown"])
    task_args = {"arithmetic": {"style": "words"}, "countdown": {"num_numbers": 4}}
    assert open_one("arithmetic", task_args, labels)[0]["prompt"][0]["content"].startswith("What is")
    assert len(open_one("countdown", task_args, labels)[0]["reward_model"]["ground_truth"]["numbers"]) == 4
    with pytest.raises(DataError, match=r"arithmetic = 'words': must be a mapping"):
        open_one("arithmetic", {"arithmetic": "words"})


def test_a_file_is_read_by_its_suffix(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a"}]))
    assert open_one(str(path))[0] == {"prompt": "a"}
