"""The learner and the engine's cache take turns on the device; an engine is replaced; callbacks and checkpoints."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import islice

import pytest
from trainer.experience_parts import RECIPE

from headwater.config.load import load_config
from headwater.core.capabilities import ServerStatus
from headwater.core.errors import DeviceMemoryFull, RankFailed, RolloutFailed, WeightsError
from headwater.learner.build import LearnerSpec
from headwater.learner.learner import LocalLearner
from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.trainer import loop
from headwater.trainer.callbacks import Callback, StopTraining
from headwater.trainer.checkpoint import Checkpoints
from headwater.trainer.learner_setup import build_training
from headwater.trainer.loop import Periods, Trainer
from headwater.trainer.memory_turns import MemoryTurns
from headwater.trainer.recorder import Recorder
from headwater.trainer.rollout_setup import build_rollout

SMALL = [
    "learner.offload_during_rollout=true", "data.num_train_rows=16", "data.num_eval_rows=4", "eval.num_prompts=2",
    "trainer.num_prompts_per_step=2", "rollout.num_samples_per_prompt=2", "trainer.total_steps=1",
    "eval.every_steps=0", "trainer.save_rollouts_every_steps=0", "trainer.checkpoint_every_steps=0",
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the quickstart for a step; returns in which order the device was given and taken."""
    calls: list[str] = []

    def record(owner, method: str, name: str, *, instead=None) -> None:
        original = instead or getattr(owner, method)

        def recorded(*args):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(owner, method, recorded)

    def fit(*overrides: str, offload=None) -> list[str]:
        config = load_config(RECIPE, [*SMALL, *overrides]).config
        rollout = build_rollout(config, config.model.path)
        try:
            rollout.sleep_cache()
            record(rollout.engine, "sleep", "cache sleeps")
            record(rollout.engine, "wake", "cache wakes")
            record(rollout.train_rollouts, "prepare_batch", "rollout")
            record(rollout.probe_rollouts, "rollout_batch", "probe")
            record(rollout.eval_rollouts, "rollout_batch", "evaluation")
            record(LocalLearner, "offload", "learner leaves", instead=offload)
            record(LocalLearner, "onload", "learner returns")
            training = build_training(LearnerSpec(config, config.model.path, config.model.path), rollout.tokenizer)
            Trainer(config, rollout, training, RunDirectory.create(tmp_path, "run"), Display()).fit()
        finally:
            rollout.close()
        return calls

    fit.calls = calls
    return fit


def turn(work: str) -> list[str]:
    return ["learner leaves", "cache wakes", work, "cache sleeps", "learner returns"]


def test_the_learner_leaves_for_evaluations_and_rollouts(run):
    assert run("warm_start.num_steps=0") == turn("evaluation") + turn("rollout") + turn("evaluation")


def test_the_learner_leaves_for_the_probes_of_a_supervised_start_and_the_engine_for_its_steps(run, monkeypatch):
    monkeypatch.setattr(MemoryTurns, "train", lambda _: run.calls.append("engine gives way"))
    settings = ["warm_start.num_steps=10", "warm_start.until_reward=0.9", "eval.before=false", "eval.after=false"]
    gives_way = ["engine gives way"]
    assert run(*settings) == gives_way + turn("probe") + gives_way + turn("rollout") + gives_way


def test_a_learner_that_could_not_leave_is_brought_back(run):
    def fails(_):
        raise MemoryError("no main memory left")

    with pytest.raises(DeviceMemoryFull, match="out of memory while moving the learner"):
        run("warm_start.num_steps=0", "eval.before=false", offload=fails)
    assert run.calls == ["learner leaves", "learner returns"]
    with pytest.raises(DeviceMemoryFull, match=r"^out of memory while moving .* \(no main memory left\)"):
        run("warm_start.num_steps=0", offload=fails)  # inside an evaluation


def test_the_time_of_a_step_contains_files_evaluations_and_checkpoints(run, tmp_path):
    run(
        "warm_start.num_steps=0", "eval.before=false", "trainer.total_steps=3", "eval.every_steps=1",
        "trainer.checkpoint_every_steps=1",
    )  # fmt: skip
    steps = [each for each in RunDirectory(tmp_path / "run").read_metrics() if each["kind"] == "train"]
    names = ("wait", "offload", "experience", "train", "publish", "record", "evaluate", "checkpoint", "other")
    for each in steps:
        assert sum(each.get(f"time/{name}_s", 0.0) for name in names) == pytest.approx(each["time/step_s"])
        assert all(each[f"time/{name}_s"] > 0 for name in names[:6])
    assert all(each["time/evaluate_s"] > 0 and each["time/checkpoint_s"] > 0 for each in steps[1:])


def test_evaluations_and_checkpoints_after_epochs_and_minutes(run, tmp_path):
    settings = [
        "warm_start.num_steps=0", "eval.before=false", "eval.after=false", "trainer.total_steps=6",
        "trainer.num_prompts_per_step=6", "trainer.keep_checkpoints=9", "rollout.num_samples_per_prompt=1",
        "algorithm.advantage=reinforce_plus_plus",
    ]  # fmt: skip
    run(*settings, "eval.every_epochs=1", "trainer.checkpoint_every_epochs=2")
    records = RunDirectory(tmp_path / "run").read_metrics()
    # 16 prompts, 6 in a step: epochs end during steps 3 and 6.
    assert [each["step"] for each in records if each["kind"] == "eval"] == [3, 6]
    assert RunDirectory(tmp_path / "run").checkpoint_steps() == [6]
    run(*settings, "trainer.checkpoint_every_minutes=1e-9")
    assert RunDirectory(tmp_path / "run-2").checkpoint_steps() == [1, 2, 3, 4, 5, 6]


def periods(num_prompts=10, *overrides, clock=lambda: 0.0):
    return Periods(load_config(None, ["trainer.num_prompts_per_step=4", *overrides]).config, num_prompts, clock)


def test_an_epoch_ends_with_the_step_that_takes_the_last_of_its_prompts():
    every = periods(10, "eval.every_epochs=1", "trainer.checkpoint_every_epochs=2")
    assert [step for step in range(1, 12) if every.evaluates(step)] == [3, 5, 8, 10]
    assert [step for step in range(1, 12) if every.saves(step)] == [5, 10]
    assert every.may_save(0, 5)
    assert not every.may_save(5, 9)
    both = periods(10, "eval.every_epochs=2", "eval.every_steps=3")
    assert [step for step in range(1, 11) if both.evaluates(step)] == [3, 5, 6, 9, 10]


def test_minutes_count_from_the_last_checkpoint():
    now = [100.0]
    every = periods(10, "trainer.checkpoint_every_minutes=2", clock=lambda: now[0])
    assert not every.saves(1)
    now[0] = 219.9
    assert not every.saves(2)
    now[0] = 220.0
    assert every.saves(3)
    every.saved()
    assert not every.saves(4)
    assert every.may_save(3, 4)
    assert not every.may_save(4, 4)
    assert not periods(10).may_save(0, 100)


def test_a_run_with_a_reference_and_checkpointed_layers_starts_and_goes_on(run, tmp_path):
    settings = ["warm_start.num_steps=2", "warm_start.until_reward=0", "eval.before=false", "eval.after=false"]
    run(
        *settings, "algorithm.kl_in_loss=0.1", "learner.checkpoint_activations=true",
        "learner.skip_zero_advantages=false",
    )  # fmt: skip
    (step,) = (each for each in RunDirectory(tmp_path / "run").read_metrics() if each["kind"] == "train")
    # The reference is the policy after its supervised start, not the one before.
    assert step["kl/reference"] == pytest.approx(0.0, abs=1e-6)


def test_an_interrupt_waits_until_a_replaced_engine_has_its_weights(tmp_path, monkeypatch):
    config = load_config(RECIPE, [*SMALL, "warm_start.num_steps=0", "eval.before=false"]).config
    rollout = build_rollout(config, config.model.path)
    sent: list[int] = []

    def interrupted_publish(learner, engine, version, **options):
        os.kill(os.getpid(), signal.SIGINT)
        published = publish(learner, engine, version, **options)
        sent.append(version)
        return published

    def wait_for_a_batch(_):
        status = replace(rollout.engine.status(), needs_weights=True)
        monkeypatch.setattr(rollout.engine, "status", lambda: status)
        rollout.tasks.while_waiting()

    publish = loop.publish
    monkeypatch.setattr(loop, "publish", interrupted_publish)
    monkeypatch.setattr(rollout.train_rollouts, "prepare_batch", wait_for_a_batch)
    run = RunDirectory.create(tmp_path, "run")
    try:
        training = build_training(LearnerSpec(config, config.model.path, config.model.path), rollout.tokenizer)
        assert not Trainer(config, rollout, training, run, Display()).fit()
    finally:
        rollout.close()
    assert sent == [0]
    assert run.checkpoint_steps() == [0]


def fit(run: RunDirectory, *overrides: str, callbacks=(), change=lambda rollout: None) -> None:
    """Train ``SMALL`` without the turns on the device. ``change`` may change the parts of the rollouts."""
    settings = [*SMALL[1:], "warm_start.num_steps=0", "eval.before=false", "eval.after=false", *overrides]
    config = load_config(RECIPE, settings).config
    rollout = build_rollout(config, config.model.path)
    try:
        change(rollout)
        training = build_training(LearnerSpec(config, config.model.path, config.model.path), rollout.tokenizer)
        Trainer(config, rollout, training, run, Display(), callbacks=callbacks).fit()
    finally:
        rollout.close()


@pytest.mark.parametrize("servers", [(), (ServerStatus("new", needs_weights=True), ServerStatus("b", is_alive=False))])
def test_new_weights_are_never_published_as_the_old_version(tmp_path, monkeypatch, servers):
    run, sent = RunDirectory.create(tmp_path, "run"), []
    publish = loop.publish

    def recorded(learner, engine, version, **options):
        sent.append((version, options.get("is_repeat", False)))
        return publish(learner, engine, version, **options)

    def replaced_after_the_update(rollout):
        def finish_all():
            status = replace(rollout.engine.status(), needs_weights=True, servers=servers)
            monkeypatch.setattr(rollout.engine, "status", lambda: status)
            rollout.tasks.while_waiting()

        monkeypatch.setattr(rollout.train_rollouts, "finish_all", finish_all)

    monkeypatch.setattr(loop, "publish", recorded)
    with pytest.raises(RolloutFailed, match="with version 0, whose weights the learner no longer has; resume"):
        fit(run, "run.deterministic=true", change=replaced_after_the_update)
    assert (0, True) not in sent
    assert run.checkpoint_steps() == [], "the weights belong to no version"


def test_damaged_weights_stop_the_run_although_they_are_compared_later(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path, "run")

    def damaged(rollout):
        monkeypatch.setattr(rollout.engine, "weights_checksum", lambda: "float32-0")

    with pytest.raises(WeightsError, match="policy version 1: the engine serves weights with checksum float32-0"):
        fit(run, "trainer.total_steps=2", change=damaged)
    assert run.checkpoint_steps() == [], "a checkpoint would need the record of its step"
    assert run.read_ledger() == []


@pytest.mark.parametrize("num_sent", [0, 1])
def test_a_rank_that_ends_while_weights_are_sent_is_the_error(tmp_path, monkeypatch, num_sent):
    cause, export, status = "rank 1: its process has ended", LocalLearner.export, LocalLearner.status
    failures = [""]

    def breaks_off(self, role="policy"):
        yield from islice(export(self, role), num_sent)
        failures.append(cause)
        raise RankFailed(cause)

    monkeypatch.setattr(LocalLearner, "export", breaks_off)
    monkeypatch.setattr(LocalLearner, "status", lambda self: replace(status(self), failure=failures[-1]))
    run = RunDirectory.create(tmp_path, "run")
    with pytest.raises(RankFailed, match=rf"^{cause}; resume from the last checkpoint$"):
        fit(run)
    assert run.checkpoint_steps() == []


def test_a_rollout_file_that_cannot_be_written_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Recorder, "_write_rollouts", fails)
    run = RunDirectory.create(tmp_path, "run")
    with pytest.raises(OSError, match="the disk is gone"):
        fit(run, "trainer.save_rollouts_every_steps=1")
    assert run.checkpoint_steps() == [1]
    assert [line["step"] for line in run.read_ledger()] == [1]
    assert [line["kind"] for line in run.read_metrics()] == ["train"], "records go on after a file of its own"


class Told(Callback):
    def __init__(self, stop_at: int = 0) -> None:
        self.steps: list[int] = []
        self.stop_at = stop_at

    def on_checkpoint(self, step, path):
        assert (path / "model").is_dir()
        self.steps.append(step)
        if step == self.stop_at:
            raise StopTraining


def test_a_step_is_saved_once_and_callbacks_are_told_once(tmp_path, monkeypatch):
    settings = [
        "trainer.total_steps=3", "trainer.checkpoint_every_steps=1", "trainer.keep_checkpoints=1", "eval.every_steps=1",
        "trainer.best_metric=eval/num_prompts",
    ]  # fmt: skip
    told = Told()
    fit(RunDirectory.create(tmp_path, "run"), *settings, callbacks=[told])
    assert told.steps == [1, 2, 3]
    # A checkpoint that is complete when the next step would begin: a callback may still end training.
    monkeypatch.setattr(Checkpoints, "check", Checkpoints.settle)
    run, told = RunDirectory.create(tmp_path, "run"), Told(stop_at=1)
    fit(run, *settings, callbacks=[told])
    assert run.checkpoint_steps() == told.steps == [1]
