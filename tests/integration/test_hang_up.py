"""A terminal that is closed, and what runs in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT, children, is_gone, metrics
from held import waits_for
from test_serve import start

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-m", "headwater.cli.main", "train", "quickstart", *CUT_DOWN]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the child in /proc")
def test_a_run_whose_terminal_is_closed_keeps_what_it_has_learned(tmp_path):
    ours, theirs = pty.openpty()
    command = [*TRAIN, f"run.root={tmp_path}", "run.name=closed", "trainer.total_steps=1000"]
    process = subprocess.Popen(
        [*command, "rollout.placement=disaggregated"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    run = tmp_path / "closed"
    try:
        wait_for_step(run, 2, process, terminal=ours)
        [child] = children(process.pid)
        os.close(ours)  # from here on the terminal cannot be written either
        process.send_signal(signal.SIGHUP)  # as the shell does besides
        assert process.wait(timeout=PROCESS_LIMIT_S) == 130
    finally:
        process.kill()
    last = metrics(run, "train")[-1]["step"]
    assert last >= 2
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{last:06d}"]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["error"], status["engine_restarts"]) == ("interrupted", "", 0)
    assert is_gone(child)


def wait_for_step(run: Path, step: int, process: subprocess.Popen, terminal: int | None = None) -> None:
    """Meanwhile its terminal is read: a progress bar fills it within seconds, and then the run may wait."""
    deadline = time.monotonic() + PROCESS_LIMIT_S
    while time.monotonic() < deadline:
        if terminal is not None:
            with contextlib.suppress(OSError):  # nothing more to read at the moment
                while os.read(terminal, 65536):
                    pass
        if (run / "metrics.jsonl").exists() and any(each["step"] >= step for each in metrics(run, "train")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


def test_under_nohup_a_run_goes_on(tmp_path):
    run, go = tmp_path / "nohup", tmp_path / "go"
    command = [*TRAIN, f"run.root={tmp_path}", "run.name=nohup", "trainer.total_steps=6", *waits_for(go, run, 2)]
    process = subprocess.Popen(["nohup", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(run, 2, process)
        process.send_signal(signal.SIGHUP)
        go.touch()
        _, err = process.communicate(timeout=PROCESS_LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert (run / "checkpoints" / "step_000006").is_dir()


def test_a_server_whose_terminal_is_closed_ends_in_order():
    server = start()
    assert server.stop(signal.SIGHUP) == 0
    assert server.lines[-1] == "stopping\n"


def test_a_server_that_nobody_reads_ends_in_order():
    command = [sys.executable, "-m", "headwater.cli.main", "serve", "tiny:qwen3", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline().startswith("serving ")
        process.stdout.close()
        process.terminate()  # it says that it stops
        assert process.wait(timeout=PROCESS_LIMIT_S) == 0
        (line,) = process.stderr.read().splitlines()
        assert line.startswith("loading tiny:qwen3 in ")
    finally:
        process.kill()
