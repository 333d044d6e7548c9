"""A run whose engine has a process of its own, which is killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import CUT_DOWN, ROOT, metrics, train_here

from headwater.observe.run_directory import RunDirectory

LONG = [*CUT_DOWN, "rollout.max_new_tokens=48", "rollout.max_staleness=2", "rollout.placement=disaggregated"]


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == pid and b"serve" in command:
            found.append(int(stat.parent.name))
    return found


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if (run / "metrics.jsonl").exists() and any(each["step"] >= step for each in metrics(run, "train")):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the child in /proc")
def test_a_run_goes_on_when_its_engine_is_killed(tmp_path):
    settings = [f"run.root={tmp_path}", "run.name=killed", "trainer.total_steps=12"]
    command = [sys.executable, "-m", "headwater.cli.main", "train", "recipes/quickstart.yaml", *LONG, *settings]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "killed"
    try:
        wait_for_step(run, 2, process)
        [child] = children(process.pid)
        os.kill(child, signal.SIGKILL)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    records = RunDirectory.open(run).read_ledger()
    trained = [group["id"] for record in records for group in record["trained"]]
    assert sorted(trained) == list(range(12 * 4))  # every prompt once; none lost with the engine
    assert records[-1]["counts"] == {"dispatched": 48, "trained": 48, "dropped": 0, "buffered": 0, "in_flight": 0}
    assert "it is restarted" in err  # a person is told
    assert json.loads((run / "status.json").read_text())["engine_restarts"] == 1
    assert not children(process.pid)


def test_where_the_engine_runs_makes_no_difference(tmp_path):
    """At staleness 0, and with an engine whose bits do not depend on what it computes together."""
    settings = [*CUT_DOWN, f"run.root={tmp_path}", "engine.deterministic=true", "trainer.total_steps=3"]
    placements = {
        "inside": ["rollout.placement=colocated"],
        "shared": ["rollout.placement=disaggregated", "rollout.weight_transfer=shared_memory"],
        "file": ["rollout.placement=disaggregated", "rollout.weight_transfer=file"],
    }
    checksums = {}
    for name, placement in placements.items():
        train_here("recipes/quickstart.yaml", *settings, f"run.name={name}", *placement)
        checksums[name] = [record["weights"] for record in RunDirectory.open(tmp_path / name).read_ledger()]
    assert len(set(checksums["inside"])) == 3
    assert checksums["inside"] == checksums["shared"] == checksums["file"]
