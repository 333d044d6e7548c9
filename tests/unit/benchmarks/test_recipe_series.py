"""Runs of the benchmark of recipes, compared after the same seconds of training."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest


def test_rewards_at_equal_times(script):
    recipes = script("recipes")

    def run(case: str, seed: int, error: str = "") -> object:
        return recipes.Run(case, seed, "", rewards=((0, 0.2, 0.0), (10, 0.4, 20.0), (20, 0.5, 30.0)), error=error)

    whole, stopped = run("a", 0), run("a", 1, error="stopped after 60 s")
    assert [recipes.reward_at(whole, seconds) for seconds in (0, 20, 25, 40)] == pytest.approx([0.2, 0.4, 0.45, 0.5])
    assert recipes.reward_at(stopped, 25) == pytest.approx(0.45)
    assert recipes.reward_at(stopped, 40) is None, "what it would have reached is not known"
    assert recipes.reward_at(recipes.Run("a", 0, ""), 1) is None
    rows = recipes.rows_at([whole, stopped, run("b", 0)], [25, 40])
    assert [(row["case"], row["at_s"], len(row["reward_per_seed"])) for row in rows] == [
        ("a", 25, 2), ("a", 40, 1), ("b", 25, 1), ("b", 40, 1),
    ]  # fmt: skip


def test_an_earlier_record_is_completed_and_not_repeated(script, tmp_path):
    recipes = script("recipes")
    earlier = [recipes.Run(case, seed, "earlier") for case, seed in (("a", 0), ("a", 1), ("b", 0))]
    (tmp_path / "record.json").write_text(json.dumps({"runs": [asdict(each) for each in earlier]}))
    added = recipes.earlier_runs(tmp_path / "record.json", [recipes.Run("a", 0, "again")])
    assert [(each.case, each.seed) for each in added] == [("a", 1), ("b", 0)]
