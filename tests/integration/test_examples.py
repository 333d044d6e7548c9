"""Each example runs through the real command line, as its docstring says, and stays short."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command import ROOT, metrics, train_small

EXAMPLES = {
    "custom_reward.py": [
        "reward.function=examples/custom_reward.py:compute_score", "reward.function_args.close_score=0.3",
    ],
    "custom_dataset.py": ["data.dataset=examples/custom_dataset.py:Doubling"],
    "custom_workflow.py": [
        "rollout.workflow=examples/custom_workflow.py:BestOfTwo", "rollout.workflow_args.min_reward=0.0",
    ],
}  # fmt: skip


def test_every_example_is_listed_and_short():
    found = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert found.keys() == EXAMPLES.keys()
    assert all(lines < 60 for lines in found.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name, tmp_path):
    result = train_small(tmp_path, "run.name=example", *EXAMPLES[name])
    assert result.code == 0, result.stderr
    run = tmp_path / "example"
    assert len(metrics(run, "train")) == 2
    rows = pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()
    CHECKS[name](rows)


def _reward_was_used(rows) -> None:
    assert all('"is_number"' in row["info"] for row in rows)


def _dataset_was_used(rows) -> None:
    assert all(row["uid"].startswith("doubling/train/") and "2*" in row["prompt"] for row in rows)


def _workflow_was_used(rows) -> None:
    assert {json.loads(row["info"])["attempts"] for row in rows} == {2}


CHECKS = {
    "custom_reward.py": _reward_was_used,
    "custom_dataset.py": _dataset_was_used,
    "custom_workflow.py": _workflow_was_used,
}


def test_a_dotted_path_works_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(ROOT)))
    result = train_small(tmp_path, "run.name=dotted", "reward.function=examples.custom_reward:compute_score")
    assert result.code == 0, result.stderr
