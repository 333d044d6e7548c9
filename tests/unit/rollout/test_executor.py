"""Groups are complete or dropped with a reason; failures stop the run or are counted, as configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

import pytest
import tiny
from rollout.held_engine import HeldEngine

from headwater.core.errors import RewardFailed, RolloutFailed, WaitTimeout
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Trajectory
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.group import PromptDraw


class Scripted:
    """A workflow that does what a function says for each episode."""

    def __init__(self, outcome: Callable[[EpisodeInput], object]) -> None:
        self.outcome = outcome
        self.keys: list[int] = []

    async def arun_episode(self, engine, data):
        self.keys.append(data.rng_key)
        await asyncio.sleep(0)
        result = self.outcome(data)
        return await result if asyncio.iscoroutine(result) else result


def ok(data: EpisodeInput) -> Trajectory:
    return Trajectory(data.prompt.uid, data.sample, (7, 8), 1, (0, 1), (0.0, -0.5), (-1, 0), 1.0, "stop")


def run(outcome, num_groups=3, on_failure="stop", timeout_s=30.0, num_prompts=100):
    workflow = Scripted(outcome)
    waiting = iter([PromptDraw(tiny.prompt(uid=f"row{number}"), number) for number in range(num_prompts)])
    with asyncio.Runner() as loop:
        executor = WorkflowExecutor(
            HeldEngine(), workflow, loop, num_samples=2, timeout_s=timeout_s, on_failure=on_failure
        )
        return executor.rollout_batch(num_groups, lambda count: list(islice(waiting, count))), workflow


def fails_on(*uids: str, error: type[Exception] = RewardFailed):
    def outcome(data):
        if data.prompt.uid in uids and data.sample == 1:
            raise error(f"no reward for {data.prompt.uid}")
        return ok(data)

    return outcome


def test_groups_keep_prompt_and_sample_order():
    batch, workflow = run(ok)
    assert [group.prompt.uid for group in batch.groups] == ["row0", "row1", "row2"]
    assert [each.sample for each in batch.groups[0].trajectories] == [0, 1]
    assert len(set(workflow.keys)) == 6


def test_a_rejected_episode_drops_its_group_and_another_prompt_takes_its_place():
    batch, _ = run(lambda data: None if data.prompt.uid == "row1" and data.sample == 0 else ok(data))
    assert [group.prompt.uid for group in batch.groups] == ["row0", "row2", "row3"]
    assert [(each.uid, each.reason) for each in batch.dropped] == [("row1", "rejected by the workflow")]


@pytest.mark.parametrize("error", [RewardFailed, RolloutFailed, KeyError])
def test_a_failed_episode_stops_the_run_or_drops_its_group(error):
    with pytest.raises((RewardFailed, RolloutFailed), match="no reward for row1"):
        run(fails_on("row1", error=error))
    batch, _ = run(fails_on("row1", error=error), on_failure="drop")
    assert [group.prompt.uid for group in batch.groups] == ["row0", "row2", "row3"]
    assert "no reward for row1" in batch.dropped[0].reason


def test_a_run_whose_rollouts_all_fail_stops_with_the_first_causes():
    with pytest.raises(
        RolloutFailed, match=r"6 groups of this step were dropped and only 0 are(.|\n)*row0: no reward for row0"
    ):
        run(fails_on(*(f"row{number}" for number in range(100))), on_failure="drop")


def test_one_good_group_does_not_make_it_loop_for_ever():
    drawn = []

    def outcome(data):
        drawn.append(data.prompt.uid)
        if data.prompt.uid != "row1":
            raise RewardFailed("never")
        return ok(data)

    with pytest.raises(RolloutFailed, match="only 1 are complete"):
        run(outcome, on_failure="drop", num_prompts=10_000)
    assert len(set(drawn)) < 20


def test_an_empty_list_is_a_rejection():
    batch, _ = run(lambda data: [] if data.prompt.uid == "row0" else ok(data))
    assert [each.uid for each in batch.dropped] == ["row0"]


def test_nothing_goes_on_after_an_error():
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
        run(outcome)
    assert sorted(ended) == ["row0", "row0", "row1", "row1"]


def test_it_stops_when_there_are_no_more_prompts():
    batch, _ = run(fails_on("row0"), num_groups=3, on_failure="drop", num_prompts=3)
    assert [group.prompt.uid for group in batch.groups] == ["row1", "row2"]


def test_nonsense_from_a_workflow_is_named():
    with pytest.raises(RolloutFailed, match="workflow Scripted returned a dict for row row0"):
        run(lambda data: {"reward": 1.0})


def test_a_workflow_that_never_returns_hits_the_named_limit():
    with pytest.raises(WaitTimeout, match="the trainer waits for rollouts: 0 of 3 groups are complete"):
        run(lambda data: asyncio.sleep(3600), timeout_s=0.3)


def test_several_trajectories_of_one_episode_join_the_group():
    batch, _ = run(lambda data: [ok(data), ok(data)])
    assert [len(group.trajectories) for group in batch.groups] == [4, 4, 4]


def test_the_engine_is_held_until_every_first_request_is_there():
    engine = HeldEngine()

    class Asking:
        async def arun_episode(self, given, data):
            given.calls.append("request")
            return ok(data)

    with asyncio.Runner() as loop:
        executor = WorkflowExecutor(engine, Asking(), loop, num_samples=3, timeout_s=30, on_failure="stop")
        executor.rollout_batch(4, lambda count: [PromptDraw(tiny.prompt(uid=f"row{row}"), row) for row in range(count)])
    assert engine.calls == ["pause", *["request"] * 12, "resume"]
