"""Standard output whose reader goes away: ``| head``, a closed terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headwater.cli.main import main

COMMAND = [sys.executable, "-m", "headwater.cli.main"]
SMALL = [
    "quickstart", "warm_start.num_steps=0", "warm_start.until_reward=0",
    "trainer.total_steps=2", "trainer.num_prompts_per_step=2", "rollout.num_samples_per_prompt=2",
    "data.num_train_rows=8", "data.num_eval_rows=8", "eval.before=false", "eval.after=false", "eval.every_steps=0",
]  # fmt: skip


def run_unread(*arguments: str) -> tuple[int, str]:
    """The exit status and standard error of a command whose output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=1200, check=False
        )
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@contextmanager
def output_that_nobody_reads() -> Iterator[None]:
    """For a command in this process, which saves the import of torch in a new one."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as unread, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that nobody watched."""
    root = tmp_path_factory.mktemp("runs")
    with output_that_nobody_reads():
        assert main(["train", *SMALL, f"run.root={root}", "run.name=unread"]) == 0
    return root / "unread"


def assert_finished(run) -> None:
    assert (run / "checkpoints" / "step_000002").is_dir()
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_a_run_goes_on_without_a_display(run):
    assert_finished(run)


@pytest.mark.slow
def test_a_run_in_a_separate_process_ends_quietly_without_a_display(tmp_path):
    assert run_unread("train", *SMALL, f"run.root={tmp_path}", "run.name=unread") == (0, "")
    assert_finished(tmp_path / "unread")


def test_an_evaluation_still_writes_its_report(run, capsys):
    with output_that_nobody_reads():
        assert main(["eval", str(run), "eval.num_prompts=2"]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads((run / "eval" / "report_000002.json").read_text())["step"] == 2


@pytest.mark.parametrize("arguments", [["config"], ["config", "--plain"]])
def test_a_command_that_only_prints_ends_as_others_do(arguments):
    assert run_unread(*arguments) == (141, "")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_doctor_does_not_call_well_what_it_could_not_tell(run, more):
    assert run_unread("doctor", str(run), *more) == (141, "")


def test_help_that_nobody_reads_is_no_error():
    code, said = run_unread("--help")
    assert code in (0, 141)  # argparse loses the error where Python does not buffer
    assert said == ""


def test_another_broken_pipe_is_an_error():
    script = "import sys\nfrom headwater.cli import config, main\n"
    script += "def run(args): raise BrokenPipeError(32, 'of a socket')\n"
    script += "config.run = run\nsys.exit(main.main(['config']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 32] of a socket\n")
