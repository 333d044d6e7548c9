"""The benchmarks of the router, at a size at which they say nothing but run."""

from __future__ import annotations

import json

import pytest


def test_every_session_finds_its_server_again(script, monkeypatch):
    router = script("router")
    monkeypatch.setattr(router, "TURN_S", 0.001)
    result = router.sessions(40)
    assert result["sticky_share"] > 0.9
    assert result["turns_per_cpu_s"] > 0


def test_controller_load_measures_with_and_without_a_router(script, monkeypatch, tmp_path):
    load = script("controller_load")
    out = tmp_path / "out.json"
    arguments = ["--servers", "3", "--per-server", "8", "--episodes", "48", "--runs", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["controller_load.py", *arguments])
    load.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["servers"], row["in_flight"]) for row in rows] == [(3, 24)]
    assert all(row["events_per_cpu_s"] > 0 for row in rows)
    with pytest.raises(SystemExit, match="must be a multiple"):
        load.Schedule(3, load.SAMPLES, load.MAX_STALENESS).batch_size  # noqa: B018
