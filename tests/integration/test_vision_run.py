"""Training with pictures: a tiny model learns to see, and does not if the pictures are blank."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from command import CUT_DOWN, metrics, train_here

from headwater.data.tasks.shapes import shapes

RECIPE = "vision-quickstart"
STALE = ["rollout.max_staleness=2", "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute"]
GUESS = 0.25
"""The share of right answers without looking: all four are equally frequent."""
SHORT = "trainer.total_steps=12"


def run_recipe(root, name, *settings):
    train_here(RECIPE, f"run.root={root}", f"run.name={name}", *settings)
    return root / name


def held_out(run):
    return [each["reward/mean"] for each in metrics(run, "eval")]


def test_engine_and_learner_see_the_picture_of_every_prompt(tmp_path):
    run = run_recipe(tmp_path, "short", *CUT_DOWN)
    drawn = {}
    for row in shapes("train", 50, 0, questions=["color"], max_shapes=1, demonstrations="half_right"):
        drawn[row["extra_info"]["index"]] = row["images"][0]["bytes"]
    rows = pq.read_table(run / "rollouts" / "step_000002.parquet").to_pylist()
    assert len(rows) == 8
    for row in rows:
        (item,) = json.loads(row["media"])
        (file,) = item["files"]
        assert (run / "media" / file).read_bytes() == drawn[int(row["uid"].rpartition("/")[2])]
        assert sum(block["length"] for block in item["blocks"]) == 4
    for each in metrics(run, "train"):
        assert each["rollout_gap/logprob_abs_max"] < 1e-3
        assert each["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.xdist_group("shapes")
@pytest.mark.parametrize("settings", [[], STALE], ids=["synchronous", "stale"])
def test_a_tiny_model_learns_to_see(tmp_path, settings):
    before, *_, after = held_out(run_recipe(tmp_path, "pictures", SHORT, *settings))
    assert before < 0.6
    assert after > max(before + 0.15, 0.7)


@pytest.mark.slow
@pytest.mark.xdist_group("shapes")
def test_a_tiny_model_learns_to_count(tmp_path):
    """Up to four shapes, so that all cells of the picture matter."""
    count = ["data.task_args.questions=[count]", "data.task_args.max_shapes=4", "trainer.total_steps=16"]
    before, *_, after = held_out(run_recipe(tmp_path, "count", *count))
    assert before < 0.65
    assert after > max(before + 0.15, 0.7)


@pytest.mark.slow
@pytest.mark.xdist_group("shapes")
@pytest.mark.parametrize("settings", [[], STALE], ids=["synchronous", "stale"])
def test_it_learns_nothing_from_blank_pictures(tmp_path, settings):
    after = held_out(run_recipe(tmp_path, "blank", "data.task_args.blank=true", SHORT, *settings))[-1]
    assert after < GUESS + 0.15
