"""Every dispatch ends exactly once, and the ledger knows the state of each."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.executor_parts import draw_of

from headwater.core.errors import RunError
from headwater.core.records import DropKind
from headwater.rollout.ledger import Ledger, LedgerCounts


def ledger_with(count: int) -> Ledger:
    ledger = Ledger()
    for number in range(count):
        assert ledger.dispatch(draw_of(number)).id == number
    return ledger


def test_a_dispatch_goes_from_in_flight_over_buffered_to_trained():
    ledger = ledger_with(3)
    assert ledger.counts() == LedgerCounts(3, 0, 0, buffered=0, in_flight=3)
    ledger.finish(1)
    assert ledger.counts() == LedgerCounts(3, 0, 0, buffered=1, in_flight=2)
    ledger.train(1, {})
    assert ledger.counts() == LedgerCounts(3, 1, 0, buffered=0, in_flight=2)


def test_a_dispatch_may_be_dropped_before_and_after_it_finished():
    ledger = ledger_with(2)
    ledger.drop(0, DropKind.REWARD_FAILED, "no reward")
    ledger.finish(1)
    ledger.drop(1, DropKind.STALE, "too old")
    assert ledger.counts() == LedgerCounts(2, 0, 2, buffered=0, in_flight=0)
    assert ledger.drops() == {
        "reward_failed": {"count": 1, "message": "no reward"},
        "stale": {"count": 1, "message": "too old"},
    }


def trained(ledger: Ledger, id: int) -> None:
    ledger.train(id, {})


def dropped(ledger: Ledger, id: int) -> None:
    ledger.drop(id, DropKind.FAILED, "again")


def finished(ledger: Ledger, id: int) -> None:
    ledger.finish(id)


def test_a_second_end_is_refused():
    for end in (trained, dropped):
        for again in (trained, dropped, finished):
            ledger = ledger_with(1)
            ledger.finish(0)
            end(ledger, 0)
            before = ledger.counts()
            with pytest.raises(RunError, match=r"dispatch 0 cannot be .*: it has already ended"):
                again(ledger, 0)
            assert ledger.counts() == before, (end, again)


def test_an_unfinished_dispatch_cannot_be_trained_on():
    with pytest.raises(RunError, match="dispatch 0 cannot be trained on: it is in_flight"):
        ledger_with(1).train(0, {})


def test_a_finished_dispatch_cannot_finish_again():
    ledger = ledger_with(1)
    ledger.finish(0)
    with pytest.raises(RunError, match="dispatch 0 cannot be finished: it is buffered"):
        ledger.finish(0)


def test_an_unknown_dispatch_cannot_end():
    with pytest.raises(RunError, match="dispatch 5"):
        ledger_with(1).drop(5, DropKind.FAILED, "unknown")


def test_counts_that_differ_from_reality_are_an_error_that_names_both():
    ledger = ledger_with(3)
    ledger.finish(0)
    assert ledger.check(num_buffered=1, num_in_flight=2).is_balanced
    with pytest.raises(RunError, match=r"'in_flight': 2.* 1 groups are buffered and 1 in flight; this is a bug"):
        ledger.check(num_buffered=1, num_in_flight=1)


def test_a_record_says_what_ended_and_how_its_tokens_were_made_and_is_taken_once():
    ledger = ledger_with(3)
    ledger.finish(1)
    ledger.train(1, {(1, 0): ((4, 2), (5, 7)), (0, 0): ((4, 3),)})
    ledger.drop(2, DropKind.REWARD_FAILED, "no reward")
    record = ledger.take_record()
    assert record == {
        "trained": [
            {"id": 1, "uid": "row1", "index": 1, "epoch": 0, "requests": [[0, 0, [[4, 3]]], [1, 0, [[4, 2], [5, 7]]]]}
        ],
        "dropped": [{"id": 2, "uid": "row2", "index": 2, "epoch": 0, "kind": "reward_failed", "message": "no reward"}],
    }
    assert json.loads(json.dumps(record)) == record
    assert ledger.take_record() == {"trained": [], "dropped": []}


def test_a_second_attempt_is_a_separate_dispatch():
    ledger = ledger_with(1)
    again = ledger.dispatch(draw_of(0), attempt=1)
    assert (again.id, again.attempt, again.draw.index) == (1, 1, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("dftx"), st.integers(0, 30)), max_size=120))
def test_the_ledger_balances_after_any_events_and_is_restored_from_its_state(events):
    ledger = Ledger()
    states: dict[int, str] = {}
    dispatches = {}
    for event, id in events:
        state = states.get(id)
        if event == "d":
            dispatch = ledger.dispatch(draw_of(id))
            states[dispatch.id], dispatches[dispatch.id] = "in_flight", dispatch
        elif event == "f" and state == "in_flight":
            ledger.finish(id)
            states[id] = "buffered"
        elif event == "t" and state == "buffered":
            ledger.train(id, {})
            states[id] = "trained"
        elif event == "x" and state in ("in_flight", "buffered"):
            ledger.drop(id, list(DropKind)[id % len(DropKind)], "why not")
            states[id] = "dropped"
        held = list(states.values())
        counts = ledger.check(num_buffered=held.count("buffered"), num_in_flight=held.count("in_flight"))
        assert (counts.trained, counts.dropped) == (held.count("trained"), held.count("dropped"))
    again = Ledger()
    again.load_state_dict(
        json.loads(json.dumps(ledger.state_dict())),
        in_flight=[dispatches[id] for id, state in states.items() if state == "in_flight"],
        buffered=[dispatches[id] for id, state in states.items() if state == "buffered"],
    )
    assert again.counts() == ledger.counts()
    assert {kind: each["count"] for kind, each in again.drops().items()} == {
        kind: each["count"] for kind, each in ledger.drops().items()
    }
    assert again.dispatch(draw_of(0)).id == len(states)
