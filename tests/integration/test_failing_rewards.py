"""A run whose reward functions crash, hang and fail: everything is counted, the ledger balances, nothing is left."""

from __future__ import annotations

from command import SMALL, headwater, metrics

from headwater.observe.doctor import examine
from headwater.observe.run_directory import RunDirectory

REWARD = """
import os, time

def compute_score(solution_str, extra_info, data_source):
    what = sum(map(ord, solution_str)) % 16
    if what in {crashes}:
        os._exit(7)
    if what in {hangs}:
        time.sleep(600)
    return {{"score": float(what % 2), "what": what}}
"""


def test_crashes_and_hangs_are_dropped_and_counted(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(REWARD.format(crashes="(1,)", hangs="(2,)"))
    done = headwater(
        "train", *SMALL, f"run.root={tmp_path}", f"reward.function={file}", "reward.timeout_s=2",
        "rollout.on_failure=drop", "rollout.max_staleness=1", "eval.before=false", "eval.after=false",
        "reward.max_failed_share=1",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    run = tmp_path / "quickstart"
    steps = metrics(run, "train")
    counts = {
        cause: sum(step.get(f"reward/failures/{cause}", 0) for step in steps) for cause in ("worker_died", "timed_out")
    }
    assert sum(counts.values()) == sum(step["reward/failed_calls"] for step in steps) > 0
    assert all("reward/what/mean" in step for step in steps)
    diagnosis = examine(RunDirectory.open(run))
    assert diagnosis.ledger.missing == 0
    assert any(each.kind == "reward_failures" for each in diagnosis.findings)
    assert "failed scoring calls" in done.stdout


def test_a_run_whose_rewards_fail_too_often_stops_and_says_why(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(solution_str): raise OSError('the index is down')\n")
    done = headwater(
        "train", *SMALL, f"run.root={tmp_path}", f"reward.function={file}", "rollout.on_failure=drop",
        "rollout.allow_partial_groups=true", "eval.before=false", "eval.after=false",
        "trainer.num_prompts_per_step=8",
    )  # fmt: skip
    assert done.code == 2
    assert "32 of 32 scoring calls failed, and reward.max_failed_share = 0.5 allows 128 of 256" in done.stderr
    assert "the most frequent cause is raised" in done.stderr
    assert "the index is down" in done.stderr


FAILS_LATER = """
import itertools
calls = itertools.count(1)
def compute_score(solution_str):
    if next(calls) > 12:
        raise OSError("the index is down")
    return float(len(solution_str) % 3)
"""


def test_a_run_that_an_error_ends_says_what_is_saved(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(FAILS_LATER)
    settings = ["eval.before=false", "eval.after=false", "trainer.total_steps=3", "reward.workers=1"]  # it counts calls
    done = headwater("train", *SMALL, f"run.root={tmp_path}", f"reward.function={file}", *settings)
    assert done.code == 2
    assert "the index is down" in done.stderr
    resume = f"headwater train --resume {tmp_path / 'quickstart'}"
    assert f"Everything up to step 1 is saved. When the error is fixed, resume with:  {resume}" in done.stdout
