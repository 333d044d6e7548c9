"""Ctrl-C, once and again, where a run is not in the middle of an update."""

from __future__ import annotations

import json
import os
import signal

import pytest

from headwater.cli.main import main
from headwater.config.load import load_config
from headwater.observe.doctor import examine
from headwater.observe.run_directory import RunDirectory
from headwater.rollout.executor import WorkflowExecutor
from headwater.trainer import summary
from headwater.trainer.checkpoint import Checkpoints
from headwater.trainer.loop import Trainer

SMALL = [
    "warm_start.num_steps=0", "warm_start.until_reward=0", "trainer.total_steps=2", "trainer.num_prompts_per_step=2",
    "rollout.num_samples_per_prompt=2", "data.num_train_rows=8", "eval.before=false", "eval.after=false",
    "eval.every_steps=0",
]  # fmt: skip


@pytest.fixture
def interrupt_in(monkeypatch):
    """Makes a method begin with Ctrl-C, once or more often."""

    def interrupt(owner, method: str, times: int = 1, patch=monkeypatch) -> None:
        original = getattr(owner, method)

        def interrupted(*args, **options):
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            return original(*args, **options)

        patch.setattr(owner, method, interrupted)

    return interrupt


def train(root, capsys, *more: str) -> tuple[int, list[str]]:
    code = main(["train", "quickstart", *SMALL, *more, f"run.root={root}", "run.name=stopped"])
    output = capsys.readouterr()
    assert output.err == ""
    return code, output.out.splitlines()


def test_ctrl_c_while_responses_are_generated_is_answered_at_once(tmp_path, capsys, interrupt_in):
    run = tmp_path / "stopped"
    interrupt_in(WorkflowExecutor, "prepare_batch")
    code, lines = train(tmp_path, capsys)
    assert code == 130
    assert lines[3] == "Stopping: saving step 0."
    assert lines[-1] == f"Interrupted; everything up to step 0 is saved. Resume with:  headwater train --resume {run}"
    _, lines = train(tmp_path, capsys)
    assert lines[:2] == [
        f"Run directory {run}-2",
        f"{run} exists and is left unchanged; to resume it:  headwater train --resume {run}",
    ]


def test_ctrl_c_again_while_the_run_ends_says_what_is_kept(tmp_path, capsys, interrupt_in):
    interrupt_in(WorkflowExecutor, "prepare_batch")
    interrupt_in(Checkpoints, "save")
    interrupt_in(summary, "draw_reward_curve")
    code, lines = train(tmp_path, capsys)
    assert code == 130
    assert lines[3:] == [
        "Stopping: saving step 0.",
        "Stopping after this checkpoint. Ctrl-C again stops immediately.",
        f"Interrupted; everything up to step 0 is saved. Resume with:  headwater train --resume {tmp_path / 'stopped'}",
    ]


def test_ctrl_c_behind_the_last_step_says_that_it_is_kept(tmp_path, capsys, interrupt_in):
    interrupt_in(summary, "draw_reward_curve")
    code, lines = train(tmp_path, capsys)
    assert code == 130
    run = tmp_path / "stopped"
    assert lines[-1] == f"Interrupted; all 2 steps are done and saved in {run}"
    _, lines = train(tmp_path, capsys)
    assert lines[1] == (
        f"{run} exists and is left unchanged; to resume it:  headwater train --resume {run} trainer.total_steps=4"
    )


def test_a_run_whose_last_checkpoint_was_given_up_is_not_finished(tmp_path, capsys, interrupt_in):
    interrupt_in(Trainer, "_evaluate")
    interrupt_in(Checkpoints, "save", times=2)
    code, lines = train(tmp_path, capsys, "eval.after=true", "eval.num_prompts=2")
    assert code == 130
    assert "Stopping: saving step 2." in lines
    run = tmp_path / "stopped"
    assert lines[-1] == f"Interrupted before the first checkpoint. Start again with:  headwater train --resume {run}"
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"


def test_an_evaluation_after_the_last_step_that_was_broken_off_is_made_by_a_resume(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_run_evaluation", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        code, lines = train(
            tmp_path, capsys, "eval.after=true", "eval.num_prompts=2", "trainer.checkpoint_every_steps=2"
        )
    run = tmp_path / "stopped"
    assert code == 130
    assert lines[-1] == f"Interrupted; everything up to step 2 is saved. Resume with:  headwater train --resume {run}"
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    assert examine(RunDirectory(run)).resume == f"headwater train --resume {run}"

    def evaluated() -> list[int]:
        return [each["step"] for each in RunDirectory(run).read_metrics() if each["kind"] == "eval"]

    assert evaluated() == []
    assert main(["train", "--resume", str(run)]) == 0
    assert evaluated() == [2]
    assert main(["train", "--resume", str(run)]) == 2
    assert "all 2 steps are done" in capsys.readouterr().err


def repeat(root, capsys, *more: str) -> tuple[int, list[str]]:
    return train(root, capsys, "run.if_exists=resume", *more)


def test_the_same_command_again_continues_the_run_until_it_is_complete(tmp_path, capsys, interrupt_in):
    run = tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_in(WorkflowExecutor, "prepare_batch", patch=patch)
        code, lines = repeat(tmp_path, capsys)
    assert (code, lines[0]) == (130, f"Run directory {run}")
    code, lines = repeat(tmp_path, capsys, "learner.learning_rate=0.25")
    assert (code, lines[0]) == (0, f"Resuming {run} after step 0")
    steps = [each for each in RunDirectory(run).read_metrics() if each["kind"] == "train"]
    assert [each["step"] for each in steps] == [1, 2]
    assert load_config(RunDirectory(run).config_file).config.learner.learning_rate == 0.25
    code, lines = repeat(tmp_path, capsys)
    assert (code, lines) == (0, [f"{run}: all 2 steps are done; nothing is left to do"])
    code, lines = repeat(tmp_path, capsys, "trainer.total_steps=3")
    assert (code, lines[0]) == (0, f"Resuming {run} after step 2")
    assert [path.name for path in tmp_path.iterdir()] == ["stopped"]


def test_the_same_command_again_with_another_model_is_refused(tmp_path, capsys):
    assert repeat(tmp_path, capsys)[0] == 0
    arguments = [*SMALL, "run.if_exists=resume", f"run.root={tmp_path}", "run.name=stopped", "trainer.total_steps=3"]
    assert main(["train", "quickstart", *arguments, "model.path=tiny:llama"]) == 2
    error = capsys.readouterr().err
    assert "model.path = 'tiny:llama' (this recipe)" in error
    assert "its weights belong to that model" in error


def test_the_same_command_again_on_another_machine_continues_the_copy(tmp_path, capsys):
    copy = f"trainer.checkpoint_dir=file://{tmp_path}/copy"
    assert repeat(tmp_path / "here", capsys, copy)[0] == 0
    code, lines = repeat(tmp_path / "there", capsys, copy, "trainer.total_steps=3")
    assert (code, lines[0]) == (0, f"Resuming {tmp_path / 'there' / 'stopped'} after step 2")


def test_a_folder_that_a_killed_start_left_is_used_again_and_a_foreign_one_is_not(tmp_path, capsys):
    left = RunDirectory.create(tmp_path, "stopped")
    code, lines = repeat(tmp_path, capsys)
    assert (code, lines[0]) == (0, f"Run directory {left.path}")
    mine = tmp_path / "mine" / "stopped"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    assert main(["train", "quickstart", *SMALL, "run.if_exists=resume", f"run.root={mine.parent}", "run.name=stopped"])
    assert "exists and is not a run directory" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_an_evaluation_alone_never_continues_a_run(tmp_path, capsys):
    assert repeat(tmp_path, capsys)[0] == 0
    code, lines = repeat(tmp_path, capsys, "eval.only=true", "eval.num_prompts=2")
    assert (code, lines[0]) == (0, f"Run directory {tmp_path / 'stopped-2'}")
