"""The quickstarts learn, on every seed, as the README promises."""

from __future__ import annotations

import json

import pytest
from command import headwater, headwater_process, metrics

RECIPES = ["quickstart", "quickstart-async"]


def learns(tmp_path, recipe: str, seed: int) -> None:
    result = headwater_process("train", recipe, f"run.root={tmp_path}", f"run.seed={seed}")
    assert result.code == 0, result.stderr
    run = tmp_path / recipe
    evaluations = metrics(run, "eval")
    assert evaluations[0]["step"] == 0
    assert evaluations[0]["reward/mean"] < 0.3
    assert evaluations[-1]["reward/mean"] > 0.8
    report = headwater("eval", run)
    assert report.code == 0, report.stderr
    file = next((run / "eval").glob("report_*.json"))
    assert json.loads(file.read_text())["reward/mean"] == evaluations[-1]["reward/mean"]


def test_reward_rises(tmp_path):
    learns(tmp_path, "quickstart", seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "seed"), [(recipe, seed) for recipe in RECIPES for seed in range(3) if (recipe, seed) != (RECIPES[0], 0)]
)
def test_reward_rises_on_other_seeds_and_asynchronously(tmp_path, recipe, seed):
    learns(tmp_path, recipe, seed)
