"""The trace: bars per name as a viewer reads them, bounded in memory."""

from __future__ import annotations

import json
import threading
import time

import pytest

from headwater.observe.spans import Spans
from headwater.observe.trace import TRACKS, Trace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def bars(trace, tmp_path):
    """(name, began, lasted in seconds, args) of every bar."""
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return [(each["name"], each["ts"] / 1e6, each["dur"] / 1e6, each["args"]) for each in events if each["ph"] == "X"]


def test_overlapping_spans_are_one_bar(clock, tmp_path):
    trace = Trace(clock=clock)
    trace.begin("reward")
    clock.now += 1
    trace.begin("reward")
    trace.begin("reward")
    clock.now += 1
    trace.end("reward")
    trace.end("reward")
    clock.now += 1
    trace.end("reward")
    assert bars(trace, tmp_path) == [("reward", 0, 3, {"spans": 3, "most at once": 3})]


def test_every_name_has_a_track_and_overlap_is_visible(clock, tmp_path):
    trace = Trace(clock=clock)
    trace.begin("train", step=1)
    clock.now += 1
    trace.begin("generate", version=0)
    clock.now += 1
    trace.end("train")
    clock.now += 1
    trace.end("generate")
    assert bars(trace, tmp_path) == [("train", 0, 2, {"step": 1}), ("generate", 1, 2, {"version": 0})]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    order = {each["tid"]: each["args"]["sort_index"] for each in events if each["name"] == "thread_sort_index"}
    tracks = {each["name"]: each["tid"] for each in events if each["ph"] == "X"}
    assert {names[tid] for tid in tracks.values()} == {"train", "generate"}
    assert order[tracks["generate"]] < order[tracks["train"]], "generation is drawn over training"


def test_only_rounds_that_follow_immediately_are_joined(clock, tmp_path):
    trace = Trace(clock=clock)
    for gap_s, version in ((0.0001, 0), (0.0001, 0), (0.5, 0), (0.0001, 0), (0.0001, 1), (0, 1)):
        trace.begin("generate", version=version)
        clock.now += 0.25
        trace.end("generate")
        clock.now += gap_s
    drawn = bars(trace, tmp_path)
    assert [(round(lasted, 3), args.get("spans", 1), args["version"]) for _, _, lasted, args in drawn] == [
        (0.75, 3, 0), (0.25, 1, 0), (0.5, 2, 1),
    ]  # fmt: skip


def test_an_open_bar_is_drawn_up_to_now_and_continues(clock, tmp_path):
    trace = Trace(clock=clock)
    trace.begin("wait", kind="batch")
    clock.now += 1
    assert bars(trace, tmp_path) == [("wait", 0, 1, {"kind": "batch"})]
    clock.now += 1
    trace.end("wait")
    clock.now += 1
    assert bars(trace, tmp_path) == [("wait", 0, 2, {"kind": "batch"})]


def test_memory_is_bounded_and_discarded_bars_are_counted(clock, tmp_path):
    trace = Trace(max_events=10, clock=clock)
    for step in range(100):
        trace.begin("train", step=step)
        clock.now += 1
        trace.end("train")
        clock.now += 1
    drawn = bars(trace, tmp_path)
    assert [args["step"] for _, _, _, args in drawn] == list(range(89, 100))
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["otherData"]["dropped_events"] == 89
    assert [each["name"] for each in content["traceEvents"] if each["ph"] == "i"] == ["89 older bars were discarded"]


def test_it_is_written_at_intervals(clock, tmp_path):
    trace, path = Trace(clock=clock), tmp_path / "trace.json"
    trace.write_if_due(path)
    assert not path.exists()
    clock.now += 61
    trace.write_if_due(path)
    first = path.stat().st_mtime_ns
    clock.now += 59
    trace.write_if_due(path)
    assert path.stat().st_mtime_ns == first
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"], "no temporary file is left"


def test_spans_of_many_threads_are_drawn_with_their_arguments(tmp_path):
    trace = Trace()
    spans = Spans(trace)

    def work(name):
        for _ in range(200):
            with spans.span(name):
                time.sleep(0)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("generate", "reward", "mine") for _ in range(4)]
    with spans.span("train", step=7):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    drawn = bars(trace, tmp_path)
    for name in ("generate", "reward", "mine"):
        assert sum(args.get("spans", 1) for each, _, _, args in drawn if each == name) == 800
    assert ("train", {"step": 7}) in [(name, args) for name, _, _, args in drawn]
    assert set(spans.drain()) == {"generate", "reward", "mine", "train"}
    assert "mine" not in TRACKS


def test_a_span_that_raises_is_closed(clock, tmp_path):
    trace = Trace(clock=clock)

    def work():
        with Spans(trace).span("publish"):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        work()
    clock.now += 5
    assert bars(trace, tmp_path) == [("publish", 0, 1, {})]


def test_an_empty_trace_can_be_written(tmp_path):
    assert bars(Trace(), tmp_path) == []
