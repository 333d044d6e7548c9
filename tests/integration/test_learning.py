"""The quickstarts learn, as the README promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import headwater, headwater_process, metrics, train_here


def assert_the_report_agrees(run: Path) -> None:
    report = headwater("eval", run)
    assert report.code == 0, report.stderr
    file = next((run / "eval").glob("report_*.json"))
    assert json.loads(file.read_text())["reward/mean"] == metrics(run, "eval")[-1]["reward/mean"]


def test_reward_rises(tmp_path):
    """In an eighth of its steps, after two thirds of its supervised start, and in this process."""
    train_here(
        "quickstart", f"run.root={tmp_path}", "warm_start.num_steps=40", "trainer.total_steps=10",
        "data.num_train_rows=1024", "eval.every_steps=0", "eval.num_prompts=64",
    )  # fmt: skip
    first, last = metrics(tmp_path / "quickstart", "eval")
    assert (first["step"], last["step"]) == (0, 10)
    assert first["reward/mean"] < 0.3
    # It reaches 0.67 here. Other processors round differently.
    assert last["reward/mean"] > 0.45
    assert_the_report_agrees(tmp_path / "quickstart")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "seed"), [("quickstart", 1), ("quickstart-async", 2)])
def test_reward_rises_with_other_seeds_and_asynchronously(tmp_path, recipe, seed):
    result = headwater_process("train", recipe, f"run.root={tmp_path}", f"run.seed={seed}", "eval.every_steps=40")
    assert result.code == 0, result.stderr
    evaluations = metrics(tmp_path / recipe, "eval")
    assert evaluations[0]["step"] == 0
    assert evaluations[0]["reward/mean"] < 0.3
    assert evaluations[-1]["reward/mean"] > 0.8
    assert_the_report_agrees(tmp_path / recipe)
