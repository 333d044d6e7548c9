"""What an exported file has, and that it says what it has not."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dashboard.parts import add_metrics, make_run, page, save_step

from headwater.dashboard import export as exporting
from headwater.dashboard.answers import Answers
from headwater.dashboard.runs import Place, Runs

LONG = 10_000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Its step 9 has one rollout of many tokens."""
    run = make_run(tmp_path_factory.mktemp("runs"), num_steps=7)
    table = pq.read_table(save_step(run, 8)).slice(0, 1)
    for name, value in (("tokens", 70), ("loss_mask", 1), ("versions", 3), ("logprobs", -0.5)):
        kind = table.schema.field(name).type.value_type
        long = pa.ListArray.from_arrays(pa.array([0, LONG], pa.int32()), pa.array(np.full(LONG, value)).cast(kind))
        table = table.set_column(table.schema.get_field_index(name), name, long)
    pq.write_table(table, run.path / "rollouts" / "step_000009.parquet")
    add_metrics(run, 9, **{"odd, 100%": 2.0})
    return run


def exported(run, rollout=None):
    html = exporting.export(Answers(Runs(Place.of(run.path))), page(), "first", rollout)
    return json.loads(re.search(r'id="headwater-data">(.*?)</script>', html, re.DOTALL)[1])


def test_all_tokens_of_a_long_rollout_are_exported(run):
    data = exported(run, "step_000009:0")
    pages = [data["/api/runs/first/tokens?id=step_000009:0" + more] for more in ("", "&offset=4096", "&offset=8192")]
    assert [token for each in pages for token in each["ids"]] == [70] * LONG
    rollout = data["/api/runs/first/rollout?id=step_000009:0"]
    assert (rollout["num_tokens_in_file"], rollout["num_tokens"], rollout["problems"]) == (LONG, LONG, [])
    assert data["/api/info"]["exported"]["contents"] == [
        "This file has the rollout step_000009:0 and 0 others of its prompt."
    ]


def test_what_is_cut_is_said(run, monkeypatch):
    monkeypatch.setattr(exporting, "_MOST_TOKENS_OF_ONE", 5000)
    data = exported(run, "step_000009:0")
    assert "/api/runs/first/tokens?id=step_000009:0&offset=8192" not in data
    rollout = data["/api/runs/first/rollout?id=step_000009:0"]
    assert rollout["num_tokens_in_file"] == 8192
    assert rollout["problems"] == ["This file has the first 8,192 of the 10,000 tokens of this rollout."]
    assert "Of 1 long rollouts" in data["/api/info"]["exported"]["contents"][-1]


def test_an_exported_run_says_which_rollouts_it_has(run, monkeypatch):
    monkeypatch.setattr(exporting, "_MOST_BYTES", 200_000)
    data = exported(run)
    curves, train, held_out, left_out = data["/api/info"]["exported"]["contents"]
    assert "1,000 points" in curves
    assert train.startswith("It has rollouts of 5 of 9 training steps (1, 3, 5, 7, 9)")
    assert held_out.startswith("It has rollouts of 1 of 1 evaluations after steps (7)")
    listed = sum(len(answer["rollouts"]) for key, answer in data.items() if "/rollouts?" in key)
    shown = sum("/rollout?" in key for key in data)
    assert left_out == f"{listed - shown} more rollouts were left out, to keep the file small."
    assert 0 < shown < listed


def test_keys_with_commas_and_percent_signs(run):
    key = "odd, 100%"
    answers = Answers(Runs(Place.of(run.path)))
    asked = answers.of_run("first", "metrics", {"keys": "reward/mean,odd%2C 100%25"})
    assert asked["series"][key]["mean"][-1] == 2.0
    assert exported(run)[f"/api/runs/first/metrics?keys={key}"]["series"][key]["mean"][-1] == 2.0
