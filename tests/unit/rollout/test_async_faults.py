"""A failing episode stops the run with its cause, or its group is dropped. The ledger balances afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import pytest
from patience import long_enough
from rollout.executor_parts import Rows, Scripted, executor_of, ok, uids
from rollout.held_engine import HeldEngine
from rollout.stale_parts import finished

import headwater.rollout.flight as flight_module
from headwater.config.schema import RewardConfig
from headwater.core.errors import DataError, HeadwaterError, RewardFailed, RolloutFailed
from headwater.core.records import Answer, DropKind
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager
from headwater.rollout.flight import Dispatch
from headwater.rollout.group import UnreadableRow
from headwater.rollout.ledger import LedgerCounts
from headwater.rollout.snapshot import RolloutSnapshot


@pytest.fixture(autouse=True)
def watch_often(monkeypatch):
    """Slow episodes are looked for once a second; tests check more often."""
    monkeypatch.setattr(flight_module, "_WATCH_EVERY_S", 0.02)


@pytest.fixture(params=[True, False], ids=["in waves", "continuously"])
def in_waves(request) -> bool:
    return request.param


def raises(data):
    raise KeyError("no such tool")


def nonsense(data):
    return {"reward": 1.0}


def of_another_prompt(data):
    return replace(ok(data), uid="row77")


def rejects(data):
    return None


def never_returns(data):
    return asyncio.sleep(3600)


async def suppresses_its_cancellation(data):
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)


async def waits_for_what_was_cancelled(data):
    other = asyncio.ensure_future(asyncio.sleep(3600))
    other.cancel()
    await other


FAULTS: list[tuple[Callable, DropKind, str]] = [
    (raises, DropKind.FAILED, "workflow Scripted on row row1 raised KeyError: 'no such tool'"),
    (nonsense, DropKind.INVALID, "workflow Scripted on row row1 returned a dict; return a Trajectory"),
    (of_another_prompt, DropKind.INVALID, "returned a trajectory of row row77; set uid"),
    (never_returns, DropKind.TIMED_OUT, "row row1: its episodes took longer than rollout.episode_timeout_s"),
    (
        suppresses_its_cancellation,
        DropKind.TIMED_OUT,
        "row row1: its episodes took longer than rollout.episode",
    ),
    (waits_for_what_was_cancelled, DropKind.FAILED, "on row row1 awaited something that was cancelled"),
]


def on_row_1(fault: Callable) -> Scripted:
    return Scripted(lambda data: fault(data) if (data.prompt.uid, data.sample) == ("row1", 1) else ok(data))


def counts(executor) -> LedgerCounts:
    return executor.check_ledger()


def test_a_fault_stops_the_run_with_its_cause(in_waves):
    def check(limit_s: float, fault: Callable, message: str) -> None:
        with executor_of(on_row_1(fault), episode_timeout_s=limit_s, in_waves=in_waves) as executor:
            with pytest.raises(RolloutFailed) as caught:
                executor.prepare_batch(Rows())
            assert message in str(caught.value), fault
            # A cancelled group has no end yet: it is still in flight, and starts again when the run is resumed.
            held = counts(executor)
            assert held.dispatched == held.in_flight + held.buffered, fault
            snapshot = executor.snapshot(dict)
            kept = {each.id for each in snapshot.in_flight} | {each.dispatch.id for each in snapshot.finished}
            assert kept == {0, 1, 2}, fault

    for fault, _, message in FAULTS:
        long_enough(partial(check, fault=fault, message=message), 0.1, 10.0)


def test_a_fault_drops_its_group_with_its_kind_and_the_run_continues(in_waves):
    def check(limit_s: float, fault: Callable, kind: DropKind, message: str) -> None:
        options = {"on_failure": "drop", "episode_timeout_s": limit_s, "in_waves": in_waves}
        with executor_of(on_row_1(fault), **options) as executor:
            batch = executor.prepare_batch(Rows())
            assert uids(batch) == ["row0", "row2", "row3"], fault
            (dropped,) = batch.dropped
            assert (dropped.uid, dropped.kind) == ("row1", kind), fault
            assert message in dropped.message
            books = executor.close_books(dict)
            assert books.counts == LedgerCounts(4, 0, 1, buffered=3, in_flight=0), fault
            assert [(each["id"], each["kind"], each["message"]) for each in books.ended["dropped"]] == [
                (1, kind, dropped.message)
            ]
            assert executor.status()["drops"] == {kind: {"count": 1, "message": dropped.message}}

    for fault, kind, message in FAULTS:
        long_enough(partial(check, fault=fault, kind=kind, message=message), 0.1, 10.0)


class FailingEngine(HeldEngine):
    async def agenerate(self, request):
        raise RolloutFailed("the queue is full")


class AsksTheEngine:
    """A workflow that passes on the engine's error, or wraps it."""

    def __init__(self, *, wraps: bool = False) -> None:
        self.wraps = wraps

    async def arun_episode(self, engine, data):
        if data.prompt.uid != "row1":
            return ok(data)
        try:
            return await engine.agenerate(None)
        except RolloutFailed as error:
            if self.wraps:
                raise RolloutFailed("no answer") from error
            raise


def test_errors_of_the_engine_and_of_the_workflow_have_different_kinds():
    for wraps, kind in ((False, DropKind.ENGINE_FAILED), (True, DropKind.FAILED)):
        with executor_of(AsksTheEngine(wraps=wraps), engine=FailingEngine(), on_failure="drop") as executor:
            (dropped,) = executor.prepare_batch(Rows()).dropped
            assert (dropped.uid, dropped.kind) == ("row1", kind)


def test_a_cause_keeps_the_error_behind_it():
    with executor_of(on_row_1(raises)) as executor:
        with pytest.raises(RolloutFailed) as caught:
            executor.prepare_batch(Rows())
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_rejected_episode_is_no_failure(in_waves):
    for on_failure in ("stop", "drop"):
        with executor_of(on_row_1(rejects), on_failure=on_failure, in_waves=in_waves) as executor:
            batch = executor.prepare_batch(Rows())
            assert uids(batch) == ["row0", "row2", "row3"], on_failure
            assert batch.dropped[0].kind == DropKind.REJECTED
            assert counts(executor).dropped == 1, on_failure


def test_a_run_whose_rollouts_all_fail_stops_with_the_first_causes(in_waves, monkeypatch):
    # Long after the limit has passed for all groups of a batch. A look between the first one's limit and the last one's
    # would end them apart, and then each is replaced before the next one has failed.
    monkeypatch.setattr(flight_module, "_WATCH_EVERY_S", 0.5)
    for fault in (raises, nonsense, rejects, never_returns):
        rows = Rows()
        with executor_of(Scripted(fault), on_failure="drop", episode_timeout_s=0.05, in_waves=in_waves) as executor:
            with pytest.raises(
                RolloutFailed, match=r"only 0 are complete; the first causes .*:\n  - row[012]: .*\n  - row"
            ):
                executor.prepare_batch(rows)
            # Two batches' worth, and then nothing more starts.
            assert rows.next == 6, fault
            assert counts(executor) == LedgerCounts(6, 0, 6, buffered=0, in_flight=0), fault


def test_failures_of_groups_that_run_ahead_also_stop_the_run():
    rows = Rows()
    with executor_of(Scripted(raises), on_failure="drop", in_waves=False, max_staleness=4) as executor:
        with pytest.raises(RolloutFailed, match="only 0 are complete"):
            executor.prepare_batch(rows)
        final = counts(executor)
        assert (final.dispatched, final.dropped) == (rows.next, rows.next)
        assert rows.next <= 15 + 6


def test_an_error_of_the_data_reaches_the_learner():
    class Broken(Rows):
        def take(self, count):
            raise HeadwaterError("rows.parquet: row 7 cannot be read")

    with executor_of(Scripted(ok), in_waves=False) as executor:
        with pytest.raises(HeadwaterError, match="row 7"):
            executor.prepare_batch(Broken())
        assert counts(executor) == LedgerCounts(0, 0, 0, buffered=0, in_flight=0)


class WithHoles(Rows):
    """Rows of which those with these numbers cannot be read."""

    def __init__(self, holes: Container[int]) -> None:
        super().__init__()
        self.holes = holes

    def take(self, count):
        return [self.again(draw.index, draw.epoch) for draw in super().take(count)]

    def again(self, index, epoch):
        draw = super().again(index, epoch)
        error = DataError(f"rows.parquet: row {index}: images[0]: no such file")
        return replace(draw, row=UnreadableRow(draw.uid, error)) if index in self.holes else draw


def test_a_row_that_cannot_be_read_is_dropped_and_another_one_takes_its_place(in_waves):
    rows, version = WithHoles({1, 4}), 0
    workflow = Scripted(lambda data: ok(data, version=version))
    with executor_of(workflow, on_failure="drop", in_waves=in_waves, max_retries=2) as executor:
        batch = executor.prepare_batch(rows)
        assert uids(batch) == ["row0", "row2", "row3"]
        assert [(each.uid, each.kind, each.message) for each in batch.dropped] == [
            ("row1", DropKind.UNREADABLE_ROW, "rows.parquet: row 1: images[0]: no such file")
        ]
        books = executor.close_books(dict)
        assert (books.counts.dropped, books.drops) == (1, {"unreadable_row": 1})
        assert books.ended["dropped"][0]["uid"] == "row1"
        executor.trained(1, str)
        version = 1
        executor.set_version(version)
        assert uids(executor.prepare_batch(rows)) == ["row5", "row6", "row7"]
        assert counts(executor).dropped == 2


def test_a_row_that_cannot_be_read_stops_the_run_unless_failures_are_dropped(in_waves):
    refused = pytest.raises(DataError, match=r"row 1: images\[0\]")
    with executor_of(Scripted(ok), in_waves=in_waves) as executor, refused:
        executor.prepare_batch(WithHoles({1}))


def test_a_run_none_of_whose_rows_can_be_read_stops_with_the_first_causes(in_waves):
    rows = WithHoles(range(10**6))
    with executor_of(Scripted(ok), on_failure="drop", in_waves=in_waves) as executor:
        with pytest.raises(RolloutFailed, match=r"fix the data.*:\n  - row[012]: rows.parquet: row .*no such file"):
            executor.prepare_batch(rows)
        assert rows.next == 6, "two batches' worth"
        assert counts(executor) == LedgerCounts(6, 0, 6, buffered=0, in_flight=0)


def test_a_row_that_could_not_be_read_is_drawn_again_after_a_restart():
    """Whether it is in flight when the checkpoint is written is a matter of time."""
    waiting = Dispatch(0, WithHoles({0}).again(0, 0))
    snapshot = RolloutSnapshot({}, {"next_id": 1, "trained": 0, "drops": {}}, in_flight=(waiting,))
    for holes, uid in ((), "row0"), ({0}, "row1"):
        read = RolloutSnapshot.from_json(snapshot.to_json(), WithHoles(holes).again)
        rows = Rows()
        rows.next = 1
        with executor_of(Scripted(ok), on_failure="drop", in_waves=False, batch_size=1) as executor:
            executor.restore(read, 0)
            assert uids(executor.prepare_batch(rows)) == [uid]
            executor.check_ledger()


def test_a_finished_group_whose_row_was_deleted_is_dropped_after_a_restart():
    rows, kept = WithHoles({5}), replace(finished(5, (0, 0), (0,)), dispatch=Dispatch(0, Rows().again(5, 0)))
    others = replace(finished(4, (0, 0), (0,)), dispatch=Dispatch(1, Rows().again(4, 0)))
    snapshot = RolloutSnapshot({}, {"next_id": 2, "trained": 0, "drops": {}}, finished=(kept, others))
    read = RolloutSnapshot.from_json(snapshot.to_json(), rows.again)
    with executor_of(Scripted(ok), on_failure="drop", in_waves=False, batch_size=2) as executor:
        executor.restore(read, 0)
        batch = executor.prepare_batch(rows)
        assert sorted(uids(batch)) == ["row0", "row4"]
        assert [(each.uid, each.kind) for each in batch.dropped] == [("row5", DropKind.UNREADABLE_ROW)]
        assert executor.check_ledger() == LedgerCounts(3, 0, 1, buffered=2, in_flight=0)


def test_an_engine_that_cannot_be_held_reaches_the_learner():
    class Broken(HeldEngine):
        def pause(self):
            raise RolloutFailed("the engine is gone")

    class Asking:
        async def arun_episode(self, engine, data):
            await engine.agenerate(ModelRequest("r", (1,), SamplingParams(max_new_tokens=1), 0))

    with executor_of(Asking(), engine=Broken()) as executor:
        with pytest.raises(RolloutFailed, match="the engine is gone"):
            executor.prepare_batch(Rows())
        assert counts(executor) == LedgerCounts(3, 0, 0, buffered=0, in_flight=3)


# Rewards


@contextmanager
def scored_by(function_file, timeout_s: float = 30.0):
    """Episodes with a user's reward function."""
    config = RewardConfig(function=f"{function_file}:compute_score", timeout_s=timeout_s, workers=1)
    with closing(NaiveRewardManager(config, Spans(None))) as manager:

        async def outcome(data):
            score = await manager.score(Answer(data.prompt, f"{data.prompt.uid} {data.sample}"))
            return ok(data, reward=score.value)

        yield Scripted(outcome)


REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "row1 1":
        {does}
    return 1.0
"""


def test_a_reward_that_fails_stops_the_run_or_drops_the_group(tmp_path, in_waves):
    def check(limit_s: float, name: str, does: str, kind: DropKind, message: str) -> None:
        file, message = tmp_path / f"{name}.py", message.format(limit_s=limit_s)
        file.write_text(REWARD.format(does=does))
        with scored_by(file, timeout_s=limit_s) as workflow, executor_of(workflow, in_waves=in_waves) as executor:
            with pytest.raises(RewardFailed, match=message):
                executor.prepare_batch(Rows())
            assert counts(executor).trained == 0, name
        with (
            scored_by(file, timeout_s=limit_s) as workflow,
            executor_of(workflow, on_failure="drop", in_waves=in_waves) as executor,
        ):
            batch = executor.prepare_batch(Rows())
            assert uids(batch) == ["row0", "row2", "row3"], name
            assert batch.dropped[0].kind == kind
            assert message in batch.dropped[0].message
            assert counts(executor) == LedgerCounts(4, 0, 1, buffered=3, in_flight=0), name

    for faults in (
        {
            "name": "raises",
            "does": "raise ValueError('judge is down')",
            "kind": DropKind.REWARD_FAILED,
            "message": "judge is down",
        },
        {
            "name": "hangs",
            "does": "time.sleep(600)",
            "kind": DropKind.REWARD_TIMED_OUT,
            "message": "no result within {limit_s:g} s",
        },
    ):
        long_enough(partial(check, **faults), 0.3, 10.0)


# From outside


def test_a_learner_that_is_interrupted_while_it_waits_leaves_books_that_balance(monkeypatch):
    """Ctrl-C reaches the learner's thread, not the rollouts."""
    started = threading.Event()

    async def slow(data):
        started.set()
        return await asyncio.sleep(3600)

    with executor_of(Scripted(slow), in_waves=False) as executor:

        def interrupted(*_, **__):
            started.wait(60)
            raise KeyboardInterrupt

        monkeypatch.setattr(executor._dispatcher, "wait_results", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.prepare_batch(Rows())
        assert counts(executor) == LedgerCounts(3, 0, 0, buffered=0, in_flight=3)
        assert [each.id for each in executor.snapshot(dict).in_flight] == [0, 1, 2]
