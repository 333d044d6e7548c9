"""Values of the wrong kind inside records that are valid otherwise. The answers are made without a server."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from dashboard.parts import add_metrics, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import HeadwaterError
from headwater.dashboard import series
from headwater.dashboard.answers import Answers
from headwater.dashboard.errors import Refused
from headwater.dashboard.plain_values import encoded
from headwater.dashboard.record_log import KINDS, RecordLog, take_many
from headwater.dashboard.runs import Place, Runs
from headwater.observe.spans import Spans
from headwater.observe.trace import Trace

_LEAVES = (
    st.none() | st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.just(10**400)
    | st.sampled_from(["", "2.5", "nan", "step", "é\ud800"])
)  # fmt: skip
_ANY = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2)
)
_TRAIN = {"kind": "train", "step": 2, "time": 3.0, "reward/mean": 0.5, "time/step_s": 1.0, "time/wait_s": 0.25,
          "time/generate_s": 0.5, "staleness/lag_0": 0.5, "staleness/lag_1": 0.5}  # fmt: skip


@pytest.mark.parametrize("value", [[3, 4], "2.5", {"x": 1}, [[1]], 10**400, None])
def test_a_value_that_is_no_number_is_no_value(value):
    """Alone, among ordinary rows, and in ``time``, too."""
    log = RecordLog(Path("/nowhere"))
    for step in (1, 2, 3):
        record = {"kind": "train", "step": step, "time": 1.0, "a": 0.5, "b": step}
        log._take(json.dumps(record | ({"time": value, "a": value} if step == 2 else {})).encode())
    log._take(json.dumps({"kind": "eval", "step": 1, "time": value, "a": value}).encode())
    np.testing.assert_array_equal(log.tables["train"].column("a"), [0.5, np.nan, 0.5])
    np.testing.assert_array_equal(log.tables["train"].column("time"), [1.0, np.nan, 1.0])
    np.testing.assert_array_equal(log.tables["train"].column("b"), [1, 2, 3])
    np.testing.assert_array_equal(log.tables["eval"].column("a"), [np.nan])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([*KINDS, "resume"]), st.dictionaries(st.sampled_from([*_TRAIN]), _ANY)),
                min_size=1, max_size=4))  # fmt: skip
def test_every_curve_can_be_made_of_any_values(changes):
    log = RecordLog(Path("/nowhere"))
    lines = [
        json.dumps({**_TRAIN, "kind": kind, "step": step, **changed}) for step, (kind, changed) in enumerate(changes)
    ]
    together = "".join(f"{line}\n" for line in lines).encode()
    if not take_many(together, log.tables):
        for line in lines:
            log._take(line.encode())
    encoded(series.listed(log))
    for table in log.tables.values():
        for points in (2, 1000):
            encoded(series.sampled(table, [*_TRAIN], points))
        encoded(series.staleness(table))
        encoded(series.stages(table))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run with every file that an answer reads, and the answers that depend on their values."""
    run = make_run(tmp_path_factory.mktemp("small"), num_steps=1)
    trace = Trace()
    with Spans(trace).span("generate", version=3):
        pass
    trace.write(run.free_trace_file())
    add_metrics(run, 2)
    return run


@settings(max_examples=60)
@given(st.data())
def test_any_values_in_status_ledger_and_trace_get_an_answer(small, data):
    """An answer that is JSON, or one sentence. Never an error of ours."""
    name = data.draw(st.sampled_from(["status.json", "ledger.jsonl", "trace.json", "metrics.jsonl"]))
    path, kept = small.path / name, (small.path / name).read_bytes()
    records = [json.loads(line) for line in kept.splitlines()] if name.endswith("l") else [json.loads(kept)]
    for record in (records := copy.deepcopy(records)):
        for _ in range(data.draw(st.integers(0, 3))):
            _change(record, data)
    try:
        path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
        answers = Answers(Runs(Place.of(small.path)))
        for what in ("", "ledger", "doctor", "engine", "timeline", "keys", "stages", "staleness", "steps"):
            with suppress(Refused, HeadwaterError):
                json.loads(encoded(answers.of_run("first", what, {})))
        assert not [each for each in answers.listing()["problems"] if "Error" in each]
    finally:
        path.write_bytes(kept)


def _change(record, data) -> None:
    """Put anything in place of one value, however deep it is. ``kind`` stays, so that the record is looked at."""
    inside = record
    while True:
        places = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        places = [place for place in places if place != "kind"]
        if not places:
            return
        place = data.draw(st.sampled_from(places))
        if not (isinstance(inside[place], (dict, list)) and inside[place] and data.draw(st.booleans())):
            inside[place] = data.draw(_ANY)
            return
        inside = inside[place]
