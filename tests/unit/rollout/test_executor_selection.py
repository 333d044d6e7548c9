"""Groups that teach nothing are replaced, within limits; a greedy episode gives each group its baseline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
import tiny
from rollout.held_engine import HeldEngine

from headwater.core.errors import RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Trajectory
from headwater.rollout.executor import GREEDY, WorkflowExecutor
from headwater.rollout.group import Group, PromptDraw, RolloutBatch


class Scored:
    """A workflow whose episodes score what a function says."""

    def __init__(self, score: Callable[[EpisodeInput], float]) -> None:
        self._score = score

    async def arun_episode(self, engine, data):
        row = Trajectory(data.prompt.uid, data.sample, (7, 8), 1, (0, 1), (0.0, -0.5), (-1, 0), 0.0, "stop")
        return replace(row, reward=self._score(data))


def differs(group: Group) -> bool:
    return len({each.reward for each in group.trajectories}) > 1


def run(score, num_groups=3, num_prompts=1000, **options) -> RolloutBatch:
    draws = iter([PromptDraw(tiny.prompt(uid=f"row{number}"), number) for number in range(num_prompts)])
    with asyncio.Runner() as loop:
        executor = WorkflowExecutor(
            HeldEngine(), Scored(score), loop, num_samples=2, timeout_s=30, **{"on_failure": "stop", **options}
        )
        return executor.rollout_batch(num_groups, lambda count: list(islice(draws, count)))


def number_of(data: EpisodeInput) -> int:
    return int(data.prompt.uid.removeprefix("row"))


def every_third(data: EpisodeInput) -> float:
    """Samples differ on rows 0, 3, 6, ..., and agree on the others."""
    return float(data.sample) if number_of(data) % 3 == 0 else 1.0


def test_only_groups_whose_samples_differ_are_kept():
    batch = run(every_third, should_accept=differs, max_rounds=10)
    assert [group.prompt.uid for group in batch.groups] == ["row0", "row3", "row6"]
    assert {each.uid for each in batch.dropped} == {"row1", "row2", "row4", "row5"}
    assert all(each.is_filtered for each in batch.dropped)


def test_after_the_last_round_it_goes_on_with_what_it_has():
    batch = run(every_third, should_accept=differs, max_rounds=1)
    assert [group.prompt.uid for group in batch.groups] == ["row0"]
    assert len(batch.dropped) == 2


def test_rounds_without_any_group_do_not_end_it_early():
    batch = run(lambda data: float(data.sample) if number_of(data) >= 9 else 0.0, should_accept=differs, max_rounds=10)
    assert [group.prompt.uid for group in batch.groups] == ["row9", "row10", "row11"]


def test_no_group_at_all_is_an_error_that_names_the_setting():
    with pytest.raises(RolloutFailed, match=r"12 groups .* only 0 are(.|\n)*row0: .*\(algorithm\.filter_groups\)"):
        run(lambda data: 0.5, should_accept=differs, max_rounds=4)


def test_what_failed_is_told_from_what_was_filtered():
    def score(data):
        if number_of(data) == 1:
            raise RewardFailed("no reward")
        return every_third(data)

    batch = run(score, should_accept=differs, max_rounds=10, on_failure="drop")
    assert [each.uid for each in batch.dropped if not each.is_filtered] == ["row1"]


def test_a_greedy_episode_gives_the_baseline_and_is_not_trained_on():
    asked = []

    def greedy(data):
        asked.append(data)
        return 10.0 + number_of(data)

    batch = run(lambda data: 1.0, greedy=Scored(greedy))
    assert [group.baseline for group in batch.groups] == [10.0, 11.0, 12.0]
    assert batch.baselines().tolist() == [10.0, 10.0, 11.0, 11.0, 12.0, 12.0]
    assert [each.reward for each in batch.trajectories] == [1.0] * 6
    assert {data.sample for data in asked} == {GREEDY}


def test_a_greedy_episode_that_fails_drops_its_group():
    def greedy(data):
        if number_of(data) == 1:
            raise RewardFailed("no baseline")
        return 0.0

    batch = run(lambda data: 1.0, greedy=Scored(greedy), on_failure="drop")
    assert [group.prompt.uid for group in batch.groups] == ["row0", "row2", "row3"]
    assert batch.dropped[0].reason == "no baseline"


def test_without_a_greedy_episode_there_is_no_baseline():
    assert run(lambda data: 1.0).baselines() is None
