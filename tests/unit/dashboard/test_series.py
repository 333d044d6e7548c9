"""Curves, staleness, stages and the timeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dashboard.parts import add_metrics, make_run, served
from hypothesis import given
from hypothesis import strategies as st

from headwater.dashboard import metric_texts
from headwater.dashboard.record_log import KINDS, RecordLog, Table, take_many
from headwater.dashboard.runs import Place, Runs
from headwater.dashboard.series import Buckets, sampled
from headwater.dashboard.timeline import Timelines, merged
from headwater.observe.run_directory import RunDirectory

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_texts_of_metrics_are_those_of_the_documentation():
    expected = metric_texts.parse(DOCS.read_text(encoding="utf-8"))
    assert json.loads(metric_texts.FILE.read_text(encoding="utf-8")) == expected, (
        "run: python -m headwater.dashboard.metric_texts docs/metrics.md"
    )
    known = metric_texts.texts()
    assert known.of("reward/max", "train").text == "the scorer's reward, over episodes"
    assert known.of("reward/gsm8k/mean", "train").text.startswith("the same, of the prompts of one data source")
    assert known.of("time/checkpoint_s", "train").group == "Time"
    assert known.of("mine", "train").group == metric_texts.OTHERS


def test_keys_come_in_groups_with_texts(client):
    groups = {each["name"]: each["keys"] for each in client.get("/runs/first/keys")["groups"]}
    rewards = {(each["key"], each["kind"]): each for each in groups["Rewards, advantages and values"]}
    assert rewards["reward/mean", "train"]["last"] == 0.3
    assert rewards["reward/mean", "train"]["text"]
    assert groups["Evaluations"][0]["key"] == "reward/mean"


def test_few_steps_are_not_sampled_and_unknown_keys_are_named(client):
    answer = client.get("/runs/first/metrics", keys="reward/mean,nothing")
    assert answer["steps"] == [1, 2, 3]
    assert answer["series"]["reward/mean"]["mean"] == [0.1, 0.2, 0.3]
    assert answer["unknown"] == ["nothing"]
    assert client.get("/runs/first/metrics", keys="reward/mean", **{"from": 2, "to": 2})["steps"] == [2]
    assert client.get("/runs/first/metrics", keys="reward/mean", kind="eval")["steps"] == [3]
    assert client.error("/runs/first/metrics", 400)[0] == "bad_request"
    assert client.error("/runs/first/metrics", 400, keys="a", points="many")[0] == "bad_request"


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=200), st.integers(1, 30))
def test_sampling_keeps_every_extreme(values, points):
    array = np.array(values, dtype=np.float64)
    buckets = Buckets(len(array), points)
    if not buckets.is_sampled:
        assert len(array) <= points
        return
    assert len(buckets.starts) == points
    finite = array[np.isfinite(array)]
    low, high = buckets.low(array), buckets.high(array)
    if len(finite):
        assert np.nanmin(low) == finite.min()
        assert np.nanmax(high) == finite.max()
    mean = buckets.mean(array)
    inside = (mean >= low - 1e30) & (mean <= high + 1e30)
    assert (np.isnan(mean) | inside).all()


@pytest.mark.parametrize("num_steps", [1500])
def test_many_steps_are_sampled_in_time_order(tmp_path, num_steps):
    run = RunDirectory(tmp_path)
    lines = [{"kind": "train", "step": step, "time": step, "x": float(step == 700)} for step in range(num_steps)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = RecordLog(run.metrics_file)
    log.refresh()
    answer = sampled(log.tables["train"], ["x"], 100)
    assert answer["is_sampled"]
    assert len(answer["steps"]) == 100
    assert answer["steps"] == sorted(answer["steps"])
    assert max(answer["series"]["x"]["max"]) == 1.0, "a single spike is not lost"
    assert answer["steps"][-1] == num_steps - 1


_VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text("1aé", max_size=2)
_RECORDS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["train", "eval", "train", "warm_start", "resume", "x"]), "step": st.integers(-1, 9)},
    optional={"time": _VALUES, "a": st.floats(-1, 1), "b": _VALUES, "c": st.integers(0, 3)},
)


@given(st.lists(_RECORDS, max_size=12), st.booleans())
def test_many_lines_are_parsed_as_one_by_one(records, is_sorted):
    if is_sorted:
        records = [record | {"step": place} for place, record in enumerate(records)]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    together = {kind: Table() for kind in KINDS}
    if not take_many(lines, together):
        assert not any(map(len, together.values())), "all or nothing"
        return
    log = RecordLog(Path("/nowhere"))
    for line in lines.splitlines():
        log._take(line)
    for kind, table in together.items():
        assert table.steps().tolist() == log.tables[kind].steps().tolist()
        for name in ("time", "a", "b", "c"):
            np.testing.assert_array_equal(table.column(name), log.tables[kind].column(name))


def test_ordinary_lines_are_parsed_together():
    lines = [{"kind": "train", "step": step, "time": 1.5, "a": step, "b": step / 2} for step in range(1, 50)]
    lines.insert(7, {"kind": "eval", "step": 7, "time": 2, "reward/mean": 0.5})
    tables = {kind: Table() for kind in KINDS}
    assert take_many("".join(json.dumps(line) + "\n" for line in lines).encode(), tables)
    assert tables["train"].column("b").tolist() == [step / 2 for step in range(1, 50)]
    assert list(tables["eval"].names()) == ["reward/mean"]


@given(st.lists(st.tuples(st.sampled_from(["train", "eval", "resume"]), st.integers(-1, 6)), max_size=25))
def test_columns_are_what_the_run_directory_reads(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("log")
    run = RunDirectory(path)
    log = RecordLog(run.metrics_file)
    for place, (kind, step) in enumerate(records):
        extra = {f"k{place % 3}": float(place)} if kind != "resume" else {}
        run.append_metrics({"kind": kind, "step": step, "time": float(place), "v": float(place), **extra})
        if place % 4 == 0:
            log.refresh()
    log.refresh()
    for kind in ("train", "eval"):
        expected = sorted((each for each in run.read_metrics() if each["kind"] == kind), key=lambda each: each["step"])
        table = log.tables[kind]
        assert table.steps().tolist() == [each["step"] for each in expected]
        assert table.column("v").tolist() == [each["v"] for each in expected]
        for name in ("k0", "k1", "k2"):
            values = [each.get(name) for each in expected]
            assert [None if value != value else value for value in table.column(name).tolist()] == values


def test_not_finite_and_foreign_values_do_not_break_a_curve(tmp_path):
    run = make_run(tmp_path)
    add_metrics(run, 4, **{"reward/mean": float("nan"), "actor/loss": float("inf")})
    with run.metrics_file.open("a") as file:
        file.write(
            'not json\n[1]\n{"kind": "train", "step": 5, "time": 1, "reward/mean": "text", "x": [1], "y": 1e999}\n'
        )
        file.write('{"kind": "train", "step": 6, "time": 1, "reward/mean": ' + "9" * 400 + "}\n")
    with served(tmp_path) as client:
        answer = client.get("/runs/first/metrics", keys="reward/mean,actor/loss")
        assert answer["series"]["reward/mean"]["mean"] == [0.1, 0.2, 0.3, None, None, None]
        assert answer["series"]["actor/loss"]["num_not_finite"] == 1
        assert "2 lines" in client.get("/runs/first")["problems"][0]


def test_staleness_and_stages(client):
    staleness = client.get("/runs/first/staleness")
    assert (staleness["lags"], staleness["last"]) == ([0, 2], [0.75, 0.25])
    assert staleness["mean"] == [0.5] * 3
    stages = client.get("/runs/first/stages")
    seconds = {each["name"]: each["seconds"] for each in stages["stages"]}
    assert seconds == {"wait": [0.5] * 3, "train": [1.0] * 3, "other": [0.5] * 3}
    assert [sum(each) for each in zip(*seconds.values(), strict=True)] == stages["step_s"]
    assert stages["totals"]["train"] == 3.0


def test_the_timeline_without_a_trace_shows_the_stages_of_each_step(client):
    timeline = client.get("/runs/first/timeline")
    assert timeline["source"] == "metrics"
    rows = {row["name"]: row["bars"] for row in timeline["rows"]}
    assert rows["wait"] == [[0.0, 0.5, 1, "step 1"], [2.0, 2.5, 1, "step 2"], [4.0, 4.5, 1, "step 3"]]
    assert [mark["step"] for mark in timeline["marks"]] == [1, 2, 3]
    assert [row["is_place_known"] for row in timeline["rows"]] == [
        row["name"] != "generate" for row in timeline["rows"]
    ]
    part = client.get("/runs/first/timeline", **{"from": 2.1, "to": 2.4})
    assert {row["name"]: len(row["bars"]) for row in part["rows"]} == {"wait": 1, "train": 0}
    assert client.error("/runs/first/timeline", 400, **{"from": 2, "to": 1})[0] == "bad_request"


def test_the_place_of_what_runs_beside_the_stages_is_not_known_from_metrics(tmp_path):
    run = make_run(tmp_path, num_steps=1)
    add_metrics(run, 2, **{"time/generate_s": 1.0})
    rows = Timelines().window(Runs(Place.of(tmp_path)).get("first"), None, None, 2000)["rows"]
    assert {row["name"]: row["is_place_known"] for row in rows} == {"generate": False, "wait": True, "train": True}


def test_the_timeline_of_a_trace(tmp_path):
    from headwater.observe.spans import Spans
    from headwater.observe.trace import Trace

    run, trace = make_run(tmp_path), Trace()
    spans = Spans(trace)
    with spans.span("generate", version=3), spans.span("train"):
        pass
    trace.write(run.free_trace_file())
    with served(tmp_path) as client:
        timeline = client.get("/runs/first/timeline")
        assert timeline["source"] == "trace"
        assert [row["name"] for row in timeline["rows"]] == ["generate", "train"]
        assert timeline["rows"][0]["bars"][0][2:] == [1, "version 3"]
        assert all(row["is_place_known"] for row in timeline["rows"])
        first, later = json.loads((run.path / "trace.json").read_text()), run.free_trace_file()
        first["otherData"]["began"] += 100.0
        later.write_text(json.dumps(first))
        both = client.get("/runs/first/timeline", **{"from": -1, "to": 1000})
        assert both["traces"] == ["trace.json", "trace-2.json"]
        begins = [bar[0] for bar in both["rows"][0]["bars"]]
        assert begins[1] - begins[0] == pytest.approx(100.0)
        assert both["total"][1] > 100.0
        later.unlink()
        (run.path / "trace.json").write_text("{")
        damaged = client.get("/runs/first/timeline")
        assert damaged["source"] == "metrics"
        assert "trace.json cannot be read" in damaged["problems"][0]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=50), st.floats(0.01, 10))
def test_merging_bars_keeps_their_number_and_extent(given_bars, narrow):
    bars = sorted((begin, begin + length, 1, "") for begin, length in given_bars)
    made = merged(bars, narrow)
    assert sum(bar[2] for bar in made) == len(bars)
    if bars:
        assert made[0][0] == bars[0][0]
        assert max(bar[1] for bar in made) == max(bar[1] for bar in bars)
