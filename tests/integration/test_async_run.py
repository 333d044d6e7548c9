"""Asynchronous runs of a tiny model: the bound, the books, the three ways of updating, interruption, and synchrony."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from books import check_books, ledger
from command import (
    CUT_DOWN,
    PROCESS_LIMIT_S,
    ROOT,
    SMALL,
    after_step,
    is_gone,
    metrics,
    send,
    signalled_process,
    train_here,
    weights,
)

import headwater.trainer.rollout_setup as rollout_setup
from headwater.cli.main import main
from headwater.cli.process import EXIT_INTERRUPTED
from headwater.config.load import load_config
from headwater.data.sampler import ShufflingSampler
from headwater.learner.build import LearnerSpec
from headwater.rollout.source import PromptStream
from headwater.trainer.learner_setup import build_training
from headwater.trainer.rollout_setup import build_rollout
from headwater.weights.publish import publish

NO_EVAL = ["eval.before=false", "eval.after=false"]
ASYNC = [
    *SMALL, *NO_EVAL, "rollout.max_staleness=2", "trainer.total_steps=5", "rollout.max_new_tokens=64",
    "engine.decode_steps=2",
]  # fmt: skip
"""Responses of 64 tokens, which an untrained model seldom ends by itself: updates happen while they are generated."""


def run_here(root: Path, name: str, *settings: str, base=ASYNC) -> Path:
    train_here(*base, f"run.root={root}", f"run.name={name}", *settings)
    return root / name


def lags(run: Path) -> set[int]:
    names = {name for record in metrics(run, "train") for name in record if name.startswith("staleness/lag_")}
    return {int(name.rpartition("_")[2]) for name in names}


def mixed_responses(run: Path) -> list[dict]:
    """Trajectories with tokens of more than one policy version."""
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert all(list(made) == sorted(made) for made in ([v for v in row["versions"] if v >= 0] for row in rows))
    return [row for row in rows if len(set(row["versions"]) - {-1}) > 1]


@pytest.mark.parametrize(
    "mode", ["interrupt", *(pytest.param(each, marks=pytest.mark.slow) for each in ("in_flight", "drain"))]
)
def test_a_run_that_generates_ahead_stays_within_its_bound(mode, tmp_path):
    for number in range(5):
        run = run_here(tmp_path, f"{mode}-{number}", f"engine.update_mode={mode}")
        check_books(run, num_steps=5)
        assert lags(run) <= {0, 1, 2}
        assert max(lags(run)) > 0
        if mode == "drain" or mixed_responses(run):
            break  # on a busy machine, every response may end between two updates
    # An update in mid-response leaves tokens of two versions, unless it waits for the response to end.
    assert bool(mixed_responses(run)) == (mode != "drain")


def hold(run: Path, step: int, buffered: int = 0) -> list[str]:
    """Settings under which the first prompt is scored only after ``step``, when ``buffered`` groups are complete."""
    row = ShufflingSampler(num_rows=50, seed=0).take(1)[0].index
    held = f"reward.function_args={{run: {run}, row: {row}, step: {step}, buffered: {buffered}}}"
    return ["reward.function=tests/integration/held.py:compute_score", held, "reward.timeout_s=1200"]


SHORT = ["rollout.max_staleness=1", "rollout.max_new_tokens=8"]


def test_what_is_too_old_is_dropped_and_drawn_once_more(tmp_path):
    """The first prompt's group is of version 0 and complete at version 3; the run cannot end without its place."""
    run = run_here(
        tmp_path, "drop", "rollout.on_stale=drop", "trainer.total_steps=6", *SHORT, *hold(tmp_path / "drop", 3)
    )
    lines = ledger(run)
    [(step, dropped)] = [(line["step"], each) for line in lines for each in line["dropped"]]
    assert step >= 4
    assert dropped["id"] == 0
    assert dropped["kind"] == "stale"
    [again] = [each for line in lines for each in line["trained"] if each["uid"] == dropped["uid"]]
    assert again["id"] > 0
    assert lines[-1]["counts"] == {"dispatched": 25, "trained": 24, "dropped": 1, "buffered": 0, "in_flight": 0}
    assert sum(each["staleness/dropped_groups"] for each in metrics(run, "train")) == 1
    assert sum(each["staleness/masked_tokens"] for each in metrics(run, "train")) == 0
    assert lags(run) <= {0, 1}


def test_what_would_become_too_old_is_waited_for(tmp_path):
    """The first prompt's group must be in the second batch; it is, though all others are complete before it."""
    run = run_here(
        tmp_path, "wait", "rollout.on_stale=wait", "trainer.total_steps=4", *SHORT, *hold(tmp_path / "wait", 1, 7)
    )
    check_books(run, num_steps=4)
    second = metrics(run, "train")[1]
    assert 0 not in [each["id"] for each in ledger(run)[0]["trained"]]
    assert 0 in [each["id"] for each in ledger(run)[1]["trained"]]
    assert second["time/wait_s"] > 0
    assert second["rollouts/buffered"] >= 4
    assert sum(each["staleness/dropped_groups"] for each in metrics(run, "train")) == 0
    assert sum(each["staleness/masked_tokens"] for each in metrics(run, "train")) == 0
    assert lags(run) <= {0, 1}


# Interruption


def steps_done(run: Path) -> int:
    return len(metrics(run, "train")) if (run / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_ctrl_c_in_the_middle_loses_and_repeats_nothing(tmp_path):
    """As does a test of ``test_replay.py``, which is faster."""
    run = tmp_path / "stopped"
    with after_step(3, lambda: send(signal.SIGINT)), contextlib.chdir(ROOT):
        code = main(["train", *ASYNC, f"run.root={tmp_path}", "run.name=stopped", "trainer.total_steps=5"])
    assert code == EXIT_INTERRUPTED
    assert steps_done(run) == 3
    train_here("--resume", run)
    check_books(run, num_steps=5)
    assert lags(run) <= {0, 1, 2}


@pytest.mark.slow
def test_a_killed_run_continues_from_its_checkpoint_and_leaves_no_process(tmp_path):
    """Faster are a test of ``test_kill.py`` and, about the process, one of ``test_serve.py``."""
    run = tmp_path / "killed"
    arguments = [
        "rollout.placement=disaggregated", "rollout.max_new_tokens=16", "trainer.checkpoint_every_steps=2",
        "trainer.checkpoint_in_background=false",
    ]  # fmt: skip
    killed = signalled_process(
        3, signal.SIGKILL, "train", *ASYNC, f"run.root={tmp_path}", "run.name=killed", *arguments
    )
    assert killed.code == -signal.SIGKILL, killed.stderr
    [engine] = re.findall(r"children: (\d+)$", killed.stdout, flags=re.MULTILINE)
    deadline = time.monotonic() + PROCESS_LIMIT_S
    while not is_gone(int(engine)):
        assert time.monotonic() < deadline, "the engine's process continues without its parent"
        time.sleep(0.05)
    assert steps_done(run) == 3
    train_here("--resume", run, "rollout.placement=colocated")
    assert [record["step"] for record in metrics(run, "resume")] == [2]
    check_books(run, num_steps=5)


# Staleness zero


SYNC = [
    "quickstart", *CUT_DOWN, *NO_EVAL, "trainer.total_steps=2", "rollout.max_new_tokens=8",
    "engine.deterministic=true", "learner.learning_rate=1e-3",
]  # fmt: skip


def checksums(run: Path) -> list[str]:
    return [line["weights"] for line in ledger(run)]


def plain_loop() -> list[str]:
    """Training as one would write it down: a batch, its experience, an update, the next version."""
    with contextlib.chdir(ROOT):
        config = load_config([SYNC[0]], SYNC[1:]).config
        rollout = build_rollout(config, config.model.path)
        try:
            training = build_training(LearnerSpec(config, config.model.path, config.model.path), rollout.tokenizer)
            stream = PromptStream(training.train_data, config.run.seed, config.data.shuffle)
            published = []
            for version in range(config.trainer.total_steps):
                batch = rollout.train_rollouts.rollout_batch(stream.take(config.trainer.num_prompts_per_step))
                experience = training.experience.make(batch, version)
                training.learner.update(experience.data)
                published.append(publish(training.learner, rollout.engine, version + 1).trained)
            return published
        finally:
            rollout.close()


def test_at_staleness_zero_the_weights_of_every_step_are_those_of_a_plain_loop(tmp_path):
    expected = plain_loop()
    assert len(set(expected)) == 2
    assert checksums(run_here(tmp_path, "continuous", base=SYNC)) == expected


@pytest.mark.slow
def test_at_staleness_zero_neither_waves_nor_few_groups_at_a_time_change_the_weights(tmp_path, monkeypatch):
    expected = plain_loop()
    few = run_here(tmp_path, "few_at_a_time", "rollout.max_concurrent_groups=3", base=SYNC)
    assert checksums(few) == expected
    original = rollout_setup.make_admission
    monkeypatch.setattr(rollout_setup, "make_admission", lambda config: replace(original(config), in_waves=True))
    assert checksums(run_here(tmp_path, "in_waves", base=SYNC)) == expected


# Decoupled PPO

DECOUPLED = ["algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute"]


@pytest.mark.slow
def test_decoupled_ppo_trains_on_old_tokens(tmp_path):
    run = run_here(tmp_path, "decoupled", *DECOUPLED, "trainer.total_steps=4")
    check_books(run, num_steps=4)
    assert lags(run) <= {0, 1, 2}
    assert max(lags(run)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "reported"), [("loglinear", False), ("metrics", True)])
def test_the_policy_in_between_is_guessed_or_the_guess_is_judged(method, reported, tmp_path):
    """``metrics`` computes it and says how far off the guess would be, which is exact where nothing is old."""
    run = run_here(
        tmp_path, method, "algorithm.policy_loss=decoupled", f"algorithm.old_logprobs={method}",
        "learner.learning_rate=1e-3", "trainer.total_steps=3",
    )  # fmt: skip
    check_books(run, num_steps=3)
    assert max(lags(run)) > 0
    assert len(set(checksums(run))) == 3
    for record in metrics(run, "train"):
        assert ("proximal_error_mean" in record) == ("rollout_logprob_gap" in record) == reported
        assert math.isfinite(record["actor/loss"])


@pytest.mark.slow
def test_decoupled_ppo_is_ppo_where_nothing_is_old(tmp_path):
    one = run_here(tmp_path, "decoupled", *DECOUPLED, "trainer.total_steps=2", base=SYNC)
    other = run_here(
        tmp_path, "ppo", "algorithm.policy_loss=ppo", "algorithm.old_logprobs=recompute", "trainer.total_steps=2",
        base=SYNC,
    )  # fmt: skip
    for first, second in zip(metrics(one, "train"), metrics(other, "train"), strict=True):
        assert first["actor/loss"] == pytest.approx(second["actor/loss"], rel=1e-4, abs=1e-6)
        assert first["actor/grad_norm"] == pytest.approx(second["actor/grad_norm"], rel=1e-3)
    mine, theirs = weights(one, 2), weights(other, 2)
    for name in mine:
        # AdamW makes a step of a gradient that is nothing but rounding, so a few values may differ by more.
        differ = (mine[name] - theirs[name]).abs() > 1e-5
        assert differ.float().mean() < 1e-3, name
