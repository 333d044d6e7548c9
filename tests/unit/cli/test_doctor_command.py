"""``headwater doctor`` on real processes: alive, killed, finished; and on folders that are something else."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from patience import long_enough

from headwater.cli.main import main
from headwater.observe.manifest import seal
from headwater.observe.run_directory import RunDirectory

# Stands for a training process: it writes its status as one does, and waits for a batch that comes when told.
CHILD = """
import sys, threading
from pathlib import Path
from headwater.core.waits import wait_until
from headwater.observe.manifest import seal
from headwater.observe.run_directory import RunDirectory
from headwater.observe.status_file import StatusFile

run, limit_s = RunDirectory.open(Path(sys.argv[1])), float(sys.argv[2])
counts = {"dispatched": 8, "trained": 4, "dropped": 0, "buffered": 1, "in_flight": 3}
doing = "7 of 8 episodes done, 1 waiting for a reward or a tool"
oldest = [{"id": 5, "uid": "row-5", "seconds": 41.0, "stages": {"done": 7, "working": 1}, "doing": doing}]
reading = {"step": 1, "total_steps": 80, "version": 1, "ledger": counts, "oldest": oldest, "capacity": 0}
reading["episodes"] = {"generating": 9, "calling_tools": 2}
condition, told = threading.Condition(), []

def listen():
    told.append(sys.stdin.readline())
    with condition:
        condition.notify_all()

threading.Thread(target=listen, daemon=True).start()
with StatusFile(run.status_file, lambda: reading, every_s=0.05), condition:
    describe = lambda: "the learner waits for batch 2: 1 of 4 groups"
    wait_until(condition, lambda: told, describe, kind="batch", hard_limit_s=limit_s)
"""


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.write_config("trainer: {total_steps: 80}\n")
    return run


@contextmanager
def training(run, limit_s):
    """A process that waits and says so."""
    command = [sys.executable, "-c", CHILD, str(run.path), str(limit_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            deadline = time.monotonic() + 300
            while not (run.status_file.exists() and json.loads(run.status_file.read_text())["waits"]):
                assert time.monotonic() < deadline, "the process never waited"
                time.sleep(0.02)
            time.sleep(0.2)
            yield child
        finally:
            child.kill()


def doctor(run, capsys, *options):
    code = main(["doctor", str(run.path), *options])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_live_run_shows_what_it_waits_for(run, capsys):
    with training(run, limit_s=600):
        code, output = doctor(run, capsys)
    assert code == 0
    assert "running" in output
    assert "step 1 of 80, policy version 1" in output
    assert re.search(r"batch, \d[\d.]* s of 10 min 0 s: the learner waits for batch 2: 1 of 4 groups", output)
    assert "row-5 (dispatch 5) runs 41 s: 7 of 8 episodes done, 1 waiting for a reward or a tool" in output
    assert "all episodes: 9 generating, 2 calling tools" in output
    assert "8 dispatched = 4 trained + 0 dropped + 1 buffered + 3 in flight" in output
    assert "✓ no problems found" in output


def test_a_live_run_that_waits_for_long_gets_advice(run, capsys):
    def check(limit_s: float) -> None:
        run.status_file.unlink(missing_ok=True)
        with training(run, limit_s):
            time.sleep(0.55 * limit_s)
            code, output = doctor(run, capsys)
        assert code == 1
        assert "✗ batch: MainThread has waited" in output
        assert "the oldest groups wait for a reward or a tool, not for the engine" in output
        assert "--resume" not in output

    long_enough(check, 4.0, 40.0)


def test_a_run_in_its_supervised_start_says_how_far_it_is(run, capsys):
    with training(run, limit_s=600):
        content = json.loads(run.status_file.read_text())
    stage = {"name": "warm start", "done": 30, "total": 200}
    run.status_file.write_text(json.dumps(content | {"step": 0, "stage": stage}))
    assert "step 0 of 80, policy version 1 warm start: step 30 of at most 200" in doctor(run, capsys)[1]


def test_a_killed_run_is_told_from_a_live_one_and_can_be_resumed(run, capsys):
    run.checkpoint(1).mkdir(parents=True)
    seal(run.checkpoint(1))
    with training(run, limit_s=600) as child:
        child.send_signal(signal.SIGKILL)
        child.wait(300)
        code, output = doctor(run, capsys)
    assert code == 1
    assert f"process {child.pid}" in output
    assert "no longer exists and did not report an end" in output
    assert "the learner waits for batch 2: 1 of 4 groups" in output, "what it did last"
    assert f"Resume with: headwater train --resume {run.path}" in output


def test_a_finished_run_is_well(run, capsys, monkeypatch):
    run.checkpoint(1).mkdir(parents=True)
    (run.checkpoint(1) / "weights").write_bytes(b"weights")
    seal(run.checkpoint(1))
    with training(run, limit_s=600) as child:
        child.communicate("go\n", timeout=300)
    with monkeypatch.context() as patch:
        patch.setattr("headwater.observe.evidence._QUICK_BYTES", 0)
        assert "the contents of the checkpoints were not compared" in doctor(run, capsys)[1]
        assert "not compared" not in doctor(run, capsys, "--verify")[1]
    code, output = doctor(run, capsys)
    assert "not compared" not in output
    assert code == 0
    assert "finished" in output
    assert "step 1 of 80" in output
    assert "row-5" not in output, "nothing runs any more"
    assert "the learner waits" not in output
    assert "--resume" not in output


def test_a_run_that_gave_up_says_why(run, capsys):
    command = [sys.executable, "-c", CHILD, str(run.path), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.wait(300)
    code, output = doctor(run, capsys)
    assert code == 1
    assert "failed" in output
    assert re.search(r"WaitTimeout: gave up after \d+ s: the learner waits for batch 2: 1 of 4 groups", output)


def test_json_is_printed_whole(run, capsys):
    with training(run, limit_s=600):
        assert main(["doctor", str(run.path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["life"]["state"] == "running"
    assert [each["kind"] for each in content["waits"]] == ["batch"]


def test_a_folder_that_is_no_run_is_an_error(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "not a run directory (config.yaml is missing)" in capsys.readouterr().err


def test_a_damaged_status_is_loud(run, capsys):
    run.status_file.write_text("{")
    code, output = doctor(run, capsys)
    assert code == 1
    assert "status.json cannot be read" in output


def test_text_that_looks_like_markup_is_printed_as_it_is(run, capsys):
    with training(run, limit_s=600) as child:
        child.kill()
        child.wait(300)
    content = json.loads(run.status_file.read_text())
    run.status_file.write_text(json.dumps(content | {"state": "failed", "error": "ValueError: [/red] of list[int]"}))
    assert "[/red] of list[int]" in doctor(run, capsys)[1]


def test_it_answers_without_the_libraries_that_are_slow_to_load(run):
    code = (
        f"import sys; from headwater.cli.main import main; main(['doctor', {str(run.path)!r}]); "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
