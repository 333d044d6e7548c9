"""Training with pictures: a tiny model learns to see, and does not if the pictures are blank."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from command import CUT_DOWN, metrics, train_here

RECIPE = "vision-quickstart"
STALE = ["rollout.max_staleness=2", "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute"]
GUESS = 0.25
"""The share of right answers without looking: all four are equally frequent."""


def run_recipe(root, name, *settings):
    train_here(RECIPE, f"run.root={root}", f"run.name={name}", *settings)
    return root / name


def held_out(run):
    return [each["reward/mean"] for each in metrics(run, "eval")]


@pytest.mark.timeout(600)
def test_every_prompt_of_a_run_has_its_picture(tmp_path):
    run = run_recipe(tmp_path, "short", *CUT_DOWN, "rollout.max_staleness=1")
    rows = pq.read_table(run / "rollouts" / "step_000002.parquet").to_pylist()
    assert len(rows) == 8
    for row in rows:
        (part, text) = json.loads(row["messages"])[0]["content"]
        assert part["type"] == "image"
        assert text["text"].endswith("?")
    assert all(each["loss/mean"] == each["loss/mean"] for each in metrics(run, "train"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("shapes")
@pytest.mark.parametrize("settings", [[], STALE], ids=["synchronous", "stale"])
def test_a_tiny_model_learns_to_see(tmp_path, settings):
    before, *_, after = held_out(run_recipe(tmp_path, "pictures", *settings))
    assert before < 0.6
    assert after > max(before + 0.15, 0.7)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("shapes")
@pytest.mark.parametrize("settings", [[], STALE], ids=["synchronous", "stale"])
def test_it_learns_nothing_from_blank_pictures(tmp_path, settings):
    after = held_out(run_recipe(tmp_path, "blank", "data.task_args.blank=true", *settings))[-1]
    assert after < GUESS + 0.15
