"""A run whose engine runs in a separate process, which is killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from command import CUT_DOWN, after_step, children, train_here

from headwater.observe.run_directory import RunDirectory

NO_EVAL = ["eval.before=false", "eval.after=false"]
LONG = [
    *CUT_DOWN,
    *NO_EVAL,
    "rollout.max_new_tokens=24",
    "rollout.max_staleness=2",
    "rollout.placement=disaggregated",
    "rollout.weight_transfer=file",
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the child in /proc")
def test_a_run_continues_when_its_engine_is_killed(tmp_path, caplog):
    run = tmp_path / "killed"

    def kill_the_engine() -> None:
        [child] = children(os.getpid())
        os.kill(child, signal.SIGKILL)

    with after_step(2, kill_the_engine):
        train_here("quickstart", *LONG, f"run.root={tmp_path}", "run.name=killed", "trainer.total_steps=6")
    records = RunDirectory.open(run).read_ledger()
    trained = [group["id"] for record in records for group in record["trained"]]
    assert sorted(trained) == list(range(6 * 4))  # every prompt once; none lost with the engine
    assert records[-1]["counts"] == {"dispatched": 24, "trained": 24, "dropped": 0, "buffered": 0, "in_flight": 0}
    assert "it is restarted" in caplog.text
    assert json.loads((run / "status.json").read_text())["engine_restarts"] == 1
    assert not children(os.getpid())


@pytest.mark.slow
def test_where_the_engine_runs_makes_no_difference(tmp_path):
    """At staleness 0, and with an engine whose bits do not depend on what it computes together."""
    settings = [*CUT_DOWN, *NO_EVAL, f"run.root={tmp_path}", "engine.deterministic=true", "trainer.total_steps=3"]
    placements = {
        "inside": ["rollout.placement=colocated"],
        "outside": ["rollout.placement=disaggregated", "rollout.weight_transfer=shared_memory"],
    }
    checksums = {}
    for name, placement in placements.items():
        train_here("quickstart", *settings, f"run.name={name}", *placement)
        checksums[name] = [record["weights"] for record in RunDirectory.open(tmp_path / name).read_ledger()]
    assert len(set(checksums["inside"])) == 3
    assert checksums["inside"] == checksums["outside"]
