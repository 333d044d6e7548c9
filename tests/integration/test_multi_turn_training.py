"""Training on episodes of several turns, from the recipe to the rollouts on disk."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest
from command import CUT_DOWN, metrics, train_here

RECIPE = "quickstart-multi-turn"


def rollouts(run, step: int) -> list[dict]:
    return pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def test_each_answer_is_trained_and_no_feedback_is(tmp_path):
    train_here(RECIPE, *CUT_DOWN, f"run.root={tmp_path}", "rollout.workflow_args.stop_reward=0.95")
    run = tmp_path / RECIPE
    assert len(metrics(run, "train")) == 2
    rows = rollouts(run, 1)
    turns = [json.loads(row["info"])["num_turns"] for row in rows]
    assert max(turns) == 3
    for row, num_turns in zip(rows, turns, strict=True):
        assert re.fullmatch("0+1+" * num_turns, "".join(map(str, row["loss_mask"])))
        assert {mask for mask, version in zip(row["loss_mask"], row["versions"], strict=True) if version == 0} == {1}
        assert len(row["tokens"]) - row["prompt_length"] <= 48


@pytest.mark.slow
def test_first_and_last_answers_get_better(tmp_path):
    train_here(RECIPE, f"run.root={tmp_path}", "trainer.total_steps=20", "eval.every_steps=20")
    run = tmp_path / RECIPE
    before, after = (each["reward/mean"] for each in metrics(run, "eval"))
    assert before < 0.5
    assert after > 0.7
    first = {step: [json.loads(row["info"])["first_reward"] for row in rollouts(run, step)] for step in (1, 20)}
    assert sum(first[1]) / len(first[1]) < 0.3
    assert sum(first[20]) / len(first[20]) > 0.6
