"""A run directory has one writer, also when processes are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from headwater.cli.main import main
from headwater.config.explain import to_yaml
from headwater.config.schema import Config
from headwater.core.errors import RunError
from headwater.observe.run_directory import RunDirectory
from headwater.observe.run_lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from headwater.observe.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.write_config(to_yaml(Config()))
    return run


@pytest.fixture
def holder(run):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(run.lock_file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def refused(run) -> str:
    with pytest.raises(RunError) as error, RunLock(run.lock_file):
        pass
    return str(error.value)


def test_another_process_is_refused_until_the_holder_ends(run, holder, capsys):
    assert f"another process writes this run: process {holder.pid} on {os.uname().nodename} (since 20" in refused(run)
    assert main(["train", "--resume", str(run.path)]) == 2
    assert f"process {holder.pid}" in capsys.readouterr().err
    assert main(["doctor", str(run.path)]) == 1, "it only reads, so it is not refused"
    holder.communicate("", timeout=300)
    with RunLock(run.lock_file):
        assert "another process writes this run: this process" in refused(run)
    assert run.lock_file.read_text() == ""


def test_a_killed_holder_releases_the_lock_and_its_children_do_not_keep_it(run, holder):
    holder.kill()
    holder.wait(300)
    assert json.loads(run.lock_file.read_text())["pid"] == holder.pid
    with RunLock(run.lock_file):
        child = os.fork()
        if not child:
            time.sleep(300)
            os._exit(0)
    try:
        with RunLock(run.lock_file):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


ELSEWHERE = {"host": "node7", "boot": "another", "pid": 7, "process_start": None, "since": 0.0, "command": "train"}


def test_a_holder_on_another_machine_is_respected_while_it_gives_signs_of_life(run):
    """As on a network file system that grants the lock to two machines."""
    run.lock_file.write_text(json.dumps(ELSEWHERE))
    os.utime(run.lock_file, (time.time() - 100,) * 2)
    with RunLock(run.lock_file, beat_s=0.01):
        os.utime(run.lock_file, (0, 0))
        deadline = time.monotonic() + 60
        while run.lock_file.stat().st_mtime == 0:
            assert time.monotonic() < deadline, "the holder does not touch the file"
            time.sleep(0.01)
    run.lock_file.write_text(json.dumps(ELSEWHERE))
    is_refused = threading.Event()

    def touch() -> None:
        while not is_refused.wait(0.05):
            run.lock_file.touch()

    touching = threading.Thread(target=touch)
    touching.start()
    try:
        assert "another process writes this run: process 7 on node7 (since " in refused(run)
    finally:
        is_refused.set()
        touching.join()
    with RunLock(run.lock_file, silent_s=1.0):  # it does not touch the file any more
        assert json.loads(run.lock_file.read_text())["pid"] == os.getpid()
    assert not list(run.path.glob(".*")), "nothing is left behind"


def test_a_damaged_lock_file_does_not_stop_a_run(run):
    for content in (b"", b"\xff\x00", b"{}", b"[]", b"7"):
        run.lock_file.write_bytes(content)
        with RunLock(run.lock_file):
            pass
