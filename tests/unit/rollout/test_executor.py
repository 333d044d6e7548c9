"""Groups are complete or dropped with a reason; failures stop the run or are counted, as configured."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import replace
from functools import partial

import pytest
from patience import long_enough
from rollout.executor_parts import Rows, Scripted, draw_of, executor_of, number_of, ok, one_batch, uids
from rollout.held_engine import HeldEngine

from headwater.core.capabilities import Capabilities
from headwater.core.errors import RewardFailed, RolloutFailed, RunError, WaitTimeout
from headwater.core.protocols import EpisodeState
from headwater.core.records import DropKind
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.rollout import joint
from headwater.rollout.flight import Dispatch, Flight
from headwater.rollout.joint import JointStart, JointTurns


def fails_on(*names: str, error: type[Exception] = RewardFailed) -> Scripted:
    def outcome(data):
        if data.prompt.uid in names and data.sample == 1:
            raise error(f"no reward for {data.prompt.uid}")
        return ok(data)

    return Scripted(outcome)


@pytest.fixture(params=[True, False], ids=["in waves", "continuously"])
def in_waves(request) -> bool:
    return request.param


def test_groups_keep_prompt_and_sample_order(in_waves):
    workflow = Scripted(ok)
    batch = one_batch(workflow, in_waves=in_waves)
    assert uids(batch) == ["row0", "row1", "row2"]
    assert [each.sample for each in batch.groups[0].trajectories] == [0, 1]
    assert len(set(workflow.keys)) == 6


def test_groups_keep_their_order_also_when_the_first_is_the_slowest(in_waves):
    async def slow_first(data):
        await asyncio.sleep(0.05 if data.prompt.uid == "row0" else 0)
        return ok(data)

    assert uids(one_batch(Scripted(slow_first), in_waves=in_waves)) == ["row0", "row1", "row2"]


def test_a_rejected_episode_drops_its_group_and_another_prompt_takes_its_place(in_waves):
    workflow = Scripted(lambda data: None if data.prompt.uid == "row1" and data.sample == 0 else ok(data))
    batch = one_batch(workflow, in_waves=in_waves)
    assert uids(batch) == ["row0", "row2", "row3"]
    assert [(each.uid, each.kind) for each in batch.dropped] == [("row1", DropKind.REJECTED)]


@pytest.mark.parametrize("error", [RewardFailed, RolloutFailed, KeyError])
def test_a_failed_episode_stops_the_run_or_drops_its_group(error, in_waves):
    with pytest.raises((RewardFailed, RolloutFailed), match="no reward for row1"):
        one_batch(fails_on("row1", error=error), in_waves=in_waves)
    batch = one_batch(fails_on("row1", error=error), on_failure="drop", in_waves=in_waves)
    assert uids(batch) == ["row0", "row2", "row3"]
    assert "no reward for row1" in batch.dropped[0].message


def test_one_good_group_does_not_make_it_loop_forever(in_waves):
    drawn = []

    def outcome(data):
        drawn.append(data.prompt.uid)
        if data.prompt.uid != "row1":
            raise RewardFailed("never")
        return ok(data)

    with pytest.raises(RolloutFailed, match="only 1 are complete"):
        one_batch(Scripted(outcome), on_failure="drop", num_prompts=10_000, in_waves=in_waves)
    assert len(set(drawn)) < 20


def test_an_empty_list_is_a_rejection():
    batch = one_batch(Scripted(lambda data: [] if data.prompt.uid == "row0" else ok(data)))
    assert [each.uid for each in batch.dropped] == ["row0"]


def test_everything_stops_after_an_error(in_waves):
    ended = []

    async def slow(data):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(data.prompt.uid)

    def outcome(data):
        if data.prompt.uid == "row2":
            raise RewardFailed("first")
        return slow(data)

    with pytest.raises(RewardFailed, match="first"):
        one_batch(Scripted(outcome), in_waves=in_waves)
    assert sorted(ended) == ["row0", "row0", "row1", "row1"]


def test_it_stops_when_there_are_no_more_prompts(in_waves):
    batch = one_batch(fails_on("row0"), on_failure="drop", num_prompts=3, in_waves=in_waves)
    assert uids(batch) == ["row1", "row2"]


def test_several_trajectories_of_one_episode_join_the_group():
    batch = one_batch(Scripted(lambda data: [ok(data, 0.1), ok(data, 0.1), ok(data, 0.1 + data.sample)]))
    assert [len(group.trajectories) for group in batch.groups] == [6, 6, 6]
    assert batch.episode_numbers().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    # One reward per episode, the mean of its pieces: exactly the reward of pieces that agree.
    assert batch.groups[0].episode_rewards() == [0.1, pytest.approx(1.3 / 3)]


def test_a_trajectory_of_another_sample_is_refused():
    with pytest.raises(RolloutFailed, match=r"on row row\d returned a trajectory of sample 0 for sample 1"):
        one_batch(Scripted(lambda data: replace(ok(data), sample=0)))


def test_the_greedy_baseline_is_the_mean_of_its_pieces():
    greedy = Scripted(lambda data: [ok(data, 1.0), ok(data, 0.0)])
    assert [group.baseline for group in one_batch(Scripted(ok), greedy=greedy).groups] == [0.5, 0.5, 0.5]


# When the engine begins


class AskedEngine(HeldEngine):
    async def agenerate(self, request):
        self.calls.append(request.request_id)
        return ModelResponse((5,), (8,), (-0.5,), (0,), "stop")


class Asking:
    """Its episodes begin with a request. ``delays`` are the seconds until then; some episodes send none."""

    def __init__(self, delays=lambda data: 0.0, silent=()) -> None:
        self.delays = delays
        self.silent = silent

    async def arun_episode(self, engine, data):
        await asyncio.sleep(self.delays(data))
        name = f"{data.prompt.uid}/{data.sample}"
        if name not in self.silent:
            await engine.agenerate(ModelRequest(name, (5,), SamplingParams(max_new_tokens=1), 0))
        return ok(data)


NAMES = [f"row{row}/{sample}" for row in range(4) for sample in range(3)]


def test_in_waves_first_requests_enter_together_and_in_order_however_slowly_episodes_begin():
    def backwards(data):
        return 0.002 * (20 - 3 * number_of(data) - data.sample)

    for delays in (lambda data: 0.0, backwards):
        for silent in ((), ("row0/0", "row2/1", "row3/2")):
            engine = AskedEngine()
            one_batch(Asking(delays, silent), engine=engine, batch_size=4, num_samples=3)
            assert engine.calls == ["pause", *(name for name in NAMES if name not in silent), "resume"]


def test_the_engine_is_held_until_it_has_every_first_request_however_many_turns_that_takes():
    async def scene() -> list[str]:
        engine, flights = HeldEngine(), [Flight(Dispatch(number, draw_of(number)), 0, 1) for number in range(3)]
        start = JointStart(engine)

        async def episode(number: int) -> None:
            await start.enter(flights[number], 0)
            for _ in range(7 * number):
                await asyncio.sleep(0)
            engine.calls.append(f"request {number}")
            start.entered(flights[number], 0)

        for each in flights:
            start.expect(each)
        episodes = [asyncio.create_task(episode(number)) for number in range(3)]
        opening = asyncio.create_task(start.open())
        while "pause" not in engine.calls:  # noqa: ASYNC110  turn by turn
            await asyncio.sleep(0)
        episodes[0].cancel()  # it was let in, and will never send its request
        await opening
        return engine.calls

    assert asyncio.run(scene()) == ["pause", "request 1", "request 2", "resume"]


def test_the_greedy_episode_starts_with_its_group():
    engine = AskedEngine()
    one_batch(Asking(), engine=engine, batch_size=2, num_samples=2, greedy=Asking())
    assert engine.calls == ["pause", "row0/0", "row0/1", "row0/-1", "row1/0", "row1/1", "row1/-1", "resume"]


class JointAskedEngine(AskedEngine):
    """Takes requests in one call, and refuses those that it is told to."""

    capabilities = Capabilities(joint_start=True)

    def __init__(self, refused=()) -> None:
        super().__init__()
        self.refused = refused
        self.left: list[str] = []

    def begin(self, requests, answers):
        self.calls.append(" ".join(each.request_id for each in requests))
        for request, answer in zip(requests, answers, strict=True):
            if request.request_id in self.refused:
                answer.set_exception(RolloutFailed(f"{request.request_id} is refused"))
            elif request.request_id != "never":
                answer.set_result(ModelResponse((5,), (8,), (-0.5,), (0,), "stop"))
        return [partial(self.left.append, each.request_id) for each in requests]


def test_an_engine_that_can_receives_all_first_requests_in_one_call():
    engine = JointAskedEngine()
    one_batch(Asking(lambda data: 0.002 * (5 - data.sample)), engine=engine, batch_size=4, num_samples=3)
    assert engine.calls == [" ".join(NAMES)]
    engine = JointAskedEngine()
    one_batch(Asking(silent=("row0/0",)), engine=engine, batch_size=1, num_samples=2, greedy=Asking())
    assert engine.calls == ["row0/1 row0/-1"]
    engine = JointAskedEngine(refused=("row1/2",))
    batch = one_batch(Asking(), engine=engine, batch_size=2, num_samples=3, on_failure="drop")
    assert uids(batch) == ["row0", "row2"]
    assert [(each.uid, each.kind) for each in batch.dropped] == [("row1", DropKind.ENGINE_FAILED)]


def test_an_episode_that_goes_away_before_or_after_the_joint_start_leaves_no_request():
    async def scene() -> JointAskedEngine:
        engine, flights = JointAskedEngine(), [Flight(Dispatch(number, draw_of(number)), 0, 1) for number in range(3)]
        start = JointStart(engine)
        states = [EpisodeState() for _ in flights]

        async def episode(number: int, name: str) -> ModelResponse:
            request = ModelRequest(name, (5,), SamplingParams(max_new_tokens=1), 0)
            with states[number].doing("waiting", "pending") as activity:
                return await start.answer(flights[number], 0, request, activity)

        for each in flights:
            start.expect(each)
        names = ["gone", "never", "answered"]
        episodes = [asyncio.create_task(episode(number, name)) for number, name in enumerate(names)]
        await asyncio.sleep(0)
        episodes[0].cancel()
        await asyncio.wait(episodes[:1])
        await start.open()
        assert [state.stage for state in states] == ["pending", "generating", "generating"]
        assert (await episodes[2]).output_tokens == (8,)
        episodes[1].cancel()
        await asyncio.wait(episodes)
        assert start.is_open
        assert not start.takes_requests
        return engine

    engine = asyncio.run(scene())
    assert (engine.calls, engine.left) == (["never answered"], ["never"])


@pytest.mark.parametrize("admission", [{"in_waves": False}, {"holds_engine": False}])
def test_an_engine_that_others_use_or_that_needs_no_waves_is_not_held(admission):
    engine = AskedEngine()
    one_batch(Asking(), engine=engine, batch_size=4, num_samples=3, **admission)
    assert sorted(engine.calls) == NAMES


def test_without_waves_the_requests_of_one_turn_enter_in_one_call_and_slow_episodes_are_not_awaited():
    engine = JointAskedEngine()
    batch = one_batch(Asking(), engine=engine, batch_size=4, num_samples=3, in_waves=False)
    assert engine.calls == [" ".join(NAMES)]
    assert uids(batch) == ["row0", "row1", "row2", "row3"]
    engine = JointAskedEngine(refused=("row1/2",))
    batch = one_batch(Asking(), engine=engine, batch_size=3, num_samples=3, on_failure="drop", in_waves=False)
    assert uids(batch) == ["row0", "row2", "row3"]
    assert [(each.uid, each.kind) for each in batch.dropped] == [("row1", DropKind.ENGINE_FAILED)]

    engine, may_begin = JointAskedEngine(), threading.Event()

    class SlowFirst(Asking):
        async def arun_episode(self, engine, data):
            if data.prompt.uid == "row0":
                await asyncio.to_thread(may_begin.wait)
            else:
                may_begin.set()  # only once the others have begun
            return await super().arun_episode(engine, data)

    one_batch(SlowFirst(), engine=engine, batch_size=2, num_samples=2, in_waves=False)
    assert sorted(" ".join(engine.calls).split()) == ["row0/0", "row0/1", "row1/0", "row1/1"]
    assert "row1/0" in engine.calls[0]
    assert "row0/0" not in engine.calls[0]


def asked(turns: JointTurns, *names: str) -> list[asyncio.Task[ModelResponse]]:
    requests = [ModelRequest(name, (5,), SamplingParams(max_new_tokens=1), 0) for name in names]
    return [asyncio.create_task(turns.agenerate(request)) for request in requests]


def test_an_episode_that_goes_away_before_or_after_its_turn_leaves_no_request():
    async def scene() -> JointAskedEngine:
        engine = JointAskedEngine()
        turns = JointTurns(engine, asyncio.get_running_loop())
        gone, never, answered = asked(turns, "gone", "never", "answered")
        asyncio.get_running_loop().call_soon(gone.cancel)  # after it has sent its request, before the engine has it
        assert (await answered).output_tokens == (8,)
        never.cancel()
        await asyncio.wait([gone, never])
        assert gone.cancelled()
        (later,) = asked(turns, "later")
        await later
        return engine

    engine = asyncio.run(scene())
    assert (engine.calls, engine.left) == (["never answered", "later"], ["never"])


def test_a_workflow_may_send_requests_from_a_thread_with_another_event_loop():
    class Threaded(Asking):
        async def arun_episode(self, engine, data):
            return await asyncio.to_thread(lambda: asyncio.run(super(Threaded, self).arun_episode(engine, data)))

    engine = JointAskedEngine()
    batch = one_batch(Threaded(), engine=engine, batch_size=2, num_samples=2, in_waves=False)
    assert uids(batch) == ["row0", "row1"]
    assert sorted(engine.calls) == ["row0/0", "row0/1", "row1/0", "row1/1"]


def test_the_engine_begins_before_very_many_episodes_of_one_turn_are_built(monkeypatch):
    async def scene() -> list[str]:
        engine = JointAskedEngine()
        turns = JointTurns(engine, asyncio.get_running_loop())
        await asyncio.gather(*asked(turns, "1", "2", "3", "4", "5"))
        return engine.calls

    monkeypatch.setattr(joint, "_MOST_PER_TURN", 2)
    assert asyncio.run(scene()) == ["1 2", "3 4", "5"]


def test_an_engine_that_takes_no_request_fails_all_of_them():
    class Broken(JointAskedEngine):
        def begin(self, requests, answers):
            raise OSError("no device")

    async def scene() -> list[BaseException | ModelResponse]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        return await asyncio.gather(*asked(JointTurns(Broken(), loop), "1", "2"), return_exceptions=True)

    assert [str(each) for each in asyncio.run(scene())] == ["the engine did not take the request: no device"] * 2


def test_a_flight_that_has_ended_is_freed_without_garbage_collection(in_waves):
    flights = []

    class Noting(Asking):
        async def arun_episode(self, engine, data):
            flights.append(weakref.ref(engine.flight))
            return await super().arun_episode(engine, data)

    gc.disable()
    try:
        one_batch(Noting(), engine=JointAskedEngine(), batch_size=2, num_samples=2, in_waves=in_waves)
        assert [each() for each in flights] == [None] * 4
    finally:
        gc.enable()


# Given prompts, as evaluation runs them


def test_given_prompts_bypass_the_ledger_and_keep_their_order():
    with executor_of(Scripted(ok)) as executor:
        batch = executor.rollout_batch([draw_of(number) for number in (5, 3, 9, 1)])
        assert uids(batch) == ["row5", "row3", "row9", "row1"]
        assert executor.check_ledger().dispatched == 0
        assert executor.staleness.counts.accepted == 0


def test_given_prompts_that_fail_are_reported_separately():
    with executor_of(fails_on("row1"), on_failure="drop") as executor:
        ended = []
        batch = executor.rollout_batch([draw_of(number) for number in range(3)], lambda: ended.append(len(ended)))
    assert uids(batch) == ["row0", "row2"]
    assert [each.uid for each in batch.dropped] == ["row1"]
    assert ended == [0, 1, 2], "also the one that was dropped"


def test_given_prompts_that_all_fail_are_an_error():
    with (
        executor_of(fails_on("row0", "row1"), on_failure="drop") as executor,
        pytest.raises(RolloutFailed, match=r"2 groups(.|\n)*row0: no reward for row0"),
    ):
        executor.rollout_batch([draw_of(0), draw_of(1)])


def test_given_prompts_that_never_return_are_cancelled_at_the_limit():
    begun, ended = threading.Event(), threading.Event()

    async def sleeps(data):
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    def check(limit_s):
        with executor_of(Scripted(sleeps), timeout_s=limit_s) as executor:
            with pytest.raises(WaitTimeout, match="waiting for rollouts: 0 of 3 groups are complete"):
                executor.rollout_batch([draw_of(number) for number in range(3)])
            assert begun.is_set()
            assert ended.wait(60)

    long_enough(check, 0.2, 10.0)


# Over several steps


class Policy(Scripted):
    """A learner that only counts versions, and a workflow that tags its tokens with the current one."""

    def __init__(self) -> None:
        super().__init__(lambda data: ok(data, version=self.version))
        self.version = 0

    def step(self, executor, rows):
        batch = executor.prepare_batch(rows)
        self.version += 1
        executor.trained(self.version, str)
        executor.set_version(self.version)
        executor.check_ledger()
        return batch


def test_batches_follow_each_other_through_the_stream(in_waves):
    rows, policy = Rows(), Policy()
    with executor_of(policy, in_waves=in_waves, num_batches=3) as executor:
        taken = [uids(policy.step(executor, rows)) for _ in range(3)]
        counts = executor.check_ledger()
    assert taken == [[f"row{3 * number + place}" for place in range(3)] for number in range(3)]
    assert (counts.dispatched, counts.trained, counts.buffered, counts.in_flight) == (9, 9, 0, 0)


LIMIT_S = 60.0


class SlowRows(Rows):
    """Rows of which two at a time can be taken early, after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.is_asked, self.may_go_on = [], threading.Event(), threading.Event()

    def take(self, count):
        self.taken.append(count)
        return super().take(count)

    async def read_ahead(self, count, at_least):
        self.is_asked.set()
        await asyncio.to_thread(self.may_go_on.wait, LIMIT_S)
        return max(at_least, min(count, 2))


def test_groups_start_as_their_prompts_are_read_but_a_wave_starts_as_a_whole(in_waves):
    rows, policy = SlowRows(), Policy()
    rows.may_go_on.set()
    with executor_of(policy, batch_size=5, in_waves=in_waves, num_batches=1) as executor:
        assert uids(policy.step(executor, rows)) == [f"row{number}" for number in range(5)]
    assert rows.taken == ([5] if in_waves else [2, 2, 1])


def test_a_pause_while_prompts_are_read_starts_none_of_them(in_waves):
    rows, policy = SlowRows(), Policy()
    with executor_of(policy, batch_size=4, in_waves=in_waves, num_batches=1) as executor:
        batch = threading.Thread(target=lambda: policy.step(executor, rows))
        batch.start()
        assert rows.is_asked.wait(LIMIT_S)
        executor.pause()
        rows.may_go_on.set()
        while executor._tasks.call(lambda: executor._dispatcher._is_admitting, "looking at the admission"):
            time.sleep(0.001)
        assert not rows.taken
        executor.resume()
        batch.join(LIMIT_S)
    assert rows.next == 4


def test_the_prompts_of_the_next_wave_are_prepared_while_the_learner_trains():
    rows, policy = Rows(), Policy()
    with executor_of(policy, batch_size=4, num_batches=2) as executor:
        num_prepared = []
        for _ in range(2):
            policy.step(executor, rows)  # it checks the ledger on the rollout thread, after the preparation
            num_prepared.append(rows.num_prepared)
    assert num_prepared == [4, 0], "nothing follows the last batch"
    assert rows.next == 8


def test_at_staleness_zero_nothing_starts_before_the_learner_has_published():
    rows = Rows()
    with executor_of(Scripted(ok), in_waves=False) as executor:
        executor.prepare_batch(rows)
        assert executor.check_ledger().dispatched == 3
        executor.trained(1, str)
        assert executor.check_ledger().dispatched == 3
        executor.set_version(1)
        executor.check_ledger()  # runs on the loop's thread, after the check of the capacity
        assert rows.next == 6


def test_in_waves_the_next_ones_start_when_the_learner_asks_for_them():
    rows, policy = Rows(), Policy()
    with executor_of(policy, in_waves=True) as executor:
        policy.step(executor, rows)
        executor.check_ledger()
        assert rows.next == 3


def test_with_capacity_for_more_batches_generation_runs_ahead():
    rows = Rows()
    with executor_of(Scripted(ok), in_waves=False, max_staleness=2) as executor:
        executor.prepare_batch(rows)
        while (counts := executor.check_ledger()).in_flight:
            pass
        assert (counts.dispatched, counts.buffered) == (9, 9)
        executor.trained(1, str)
        assert executor.check_ledger().trained == 3


def test_no_group_starts_for_a_batch_after_the_last():
    rows, policy = Rows(), Policy()
    with executor_of(policy, in_waves=False, max_staleness=4, num_batches=2) as executor:
        for _ in range(2):
            policy.step(executor, rows)
        counts = executor.check_ledger()
    assert rows.next == 6
    assert (counts.trained, counts.buffered, counts.in_flight) == (6, 0, 0)


def test_max_concurrent_limits_the_running_groups():
    running, most = set(), []

    async def outcome(data):
        running.add(number_of(data))
        most.append(len(running))
        await asyncio.sleep(0)
        running.discard(number_of(data))
        return ok(data)

    one_batch(Scripted(outcome), num_samples=1, batch_size=12, in_waves=False, max_concurrent=5)
    assert max(most) == 5


def test_a_submitted_prompt_runs_before_those_that_are_drawn():
    with executor_of(Scripted(ok), in_waves=False) as executor:
        first, second = executor.submit(draw_of(70)), executor.submit(draw_of(71))
        assert (first, second) == (0, 1)
        assert uids(executor.prepare_batch(Rows())) == ["row70", "row71", "row0"]


def test_submitted_prompts_alone_are_waited_for():
    with executor_of(Scripted(ok), in_waves=False) as executor:
        for number in range(2):
            executor.submit(draw_of(number))
        assert uids(executor.wait(2)) == ["row0", "row1"]
        executor.check_ledger()


def test_tags_that_would_make_every_group_too_old_are_an_error_and_not_a_loop(in_waves):
    rows = Rows()
    with executor_of(Scripted(ok), in_waves=in_waves) as executor:
        executor.prepare_batch(rows)
        executor.trained(1, str)
        executor.set_version(1)  # but the workflow still tags its tokens with 0
        with pytest.raises(RunError, match="row row3 started under policy version 1 and has tokens tagged 0"):
            executor.prepare_batch(rows)
        executor.check_ledger()


# Pausing


def test_a_second_pause_has_no_effect():
    def check(limit_s):
        rows = Rows()
        with executor_of(Scripted(ok), in_waves=False, max_staleness=1, timeout_s=limit_s) as executor:
            executor.pause()
            executor.pause()
            with pytest.raises(WaitTimeout, match="batch 1: 0 of 3 groups; no group is running"):
                executor.prepare_batch(rows)
            assert rows.next == 0
            executor.check_ledger()
            executor.resume()
            assert uids(executor.prepare_batch(rows)) == ["row0", "row1", "row2"]
            executor.check_ledger()

    long_enough(check, 0.2, 10.0)


def test_running_groups_continue_during_a_pause():
    release, started = threading.Event(), []

    async def outcome(data):
        started.append(data.prompt.uid)
        await asyncio.to_thread(release.wait, 60)
        return ok(data)

    rows = Rows()
    with executor_of(Scripted(outcome), in_waves=False, max_concurrent=2) as executor:
        executor.submit(draw_of(100))
        executor.submit(draw_of(101))
        while len(started) < 4:  # both episodes of both groups
            time.sleep(0.001)
        executor.pause()
        release.set()
        executor.submit(draw_of(102))
        while executor.check_ledger().buffered < 2:
            pass
        assert executor.check_ledger().in_flight == 1
        executor.resume()
        assert uids(executor.prepare_batch(rows)) == ["row100", "row101", "row102"]


# Status


def test_the_status_names_the_oldest_groups_and_what_they_do():
    started = threading.Event()

    async def outcome(data):
        if data.sample == 0:
            return ok(data)
        started.set()
        return await asyncio.sleep(3600)

    with executor_of(Scripted(outcome), in_waves=False) as executor:
        executor.submit(draw_of(4))
        started.wait(60)
        executor.check_ledger()
        (oldest,) = executor.status()["oldest"]
        assert (oldest["id"], oldest["uid"]) == (0, "row4")
        assert oldest["doing"] == "1 of 2 episodes done, 1 waiting for a reward or a tool"
        assert oldest["stages"] == executor.status()["episodes"] == {"done": 1, "working": 1}
