"""Rollouts that run ahead of training, on one device."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import tiny

from headwater.cli.main import main
from headwater.observe.run_directory import RunDirectory


def train(root, *settings: str) -> RunDirectory:
    fast = ["eval.every_steps=0", "trainer.total_steps=16", "rollout.max_staleness=2", "model.dtype=bfloat16"]
    assert main(["train", "quickstart", f"run.root={root}", *fast, *settings]) == 0
    return RunDirectory.open(root / "quickstart")


@pytest.mark.parametrize("mode", ["interrupt", "in_flight", "drain"])
def test_a_run_with_old_samples_learns_and_keeps_the_bound(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    run = train(tmp_path, f"engine.update_mode={mode}")
    for record in run.read_ledger():
        counts = record["counts"]
        ended = counts["trained"] + counts["dropped"] + counts["buffered"] + counts["in_flight"]
        assert counts["dispatched"] == ended
    steps = [each for each in run.read_metrics() if each["kind"] == "train"]
    lags = {int(key.rpartition("_")[2]) for each in steps for key in each if key.startswith("staleness/lag_")}
    assert max(lags) == 2
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.15


def test_weights_change_in_the_middle_of_a_response(tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    run = train(
        tmp_path,
        "warm_start.num_steps=0",
        "rollout.max_new_tokens=384",
        "rollout.max_concurrent_groups=24",
        "trainer.total_steps=6",
    )
    rows = [row for path in (run.path / "rollouts").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    mixed = [row for row in rows if len({version for version in row["versions"] if version >= 0}) > 1]
    assert mixed
    for row in mixed:
        made = [version for version in row["versions"] if version >= 0]
        assert made == sorted(made)
