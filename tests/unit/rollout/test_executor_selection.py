"""Groups without different rewards are replaced, within limits; a greedy episode provides the baseline of a group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rollout.executor_parts import Scripted, number_of, ok, one_batch, uids

from headwater.core.errors import RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeInput
from headwater.core.records import DropKind
from headwater.rollout.group import Group, RolloutBatch
from headwater.rollout.group_runner import GREEDY


def scored(score: Callable[[EpisodeInput], float]) -> Scripted:
    """A workflow whose episodes score what a function says."""
    return Scripted(lambda data: ok(data, reward=score(data)))


def differs(group: Group) -> bool:
    return len({each.reward for each in group.trajectories}) > 1


@pytest.fixture(params=[True, False], ids=["in waves", "continuously"])
def run(request) -> Callable[..., RolloutBatch]:
    def first_batch(score, **options) -> RolloutBatch:
        return one_batch(scored(score), num_prompts=1000, in_waves=request.param, **options)

    return first_batch


def every_third(data: EpisodeInput) -> float:
    """Samples differ on rows 0, 3, 6, ..., and agree on the others."""
    return float(data.sample) if number_of(data) % 3 == 0 else 1.0


def test_only_groups_whose_samples_differ_are_kept(run):
    batch = run(every_third, should_accept=differs, max_rounds=10)
    assert uids(batch) == ["row0", "row3", "row6"]
    assert {each.uid for each in batch.dropped} == {"row1", "row2", "row4", "row5"}
    assert all(each.kind == DropKind.FILTERED for each in batch.dropped)


def test_after_the_last_round_the_batch_may_be_short():
    batch = one_batch(scored(every_third), should_accept=differs, max_rounds=1)
    assert uids(batch) == ["row0"]
    assert len(batch.dropped) == 2


def test_rounds_without_any_group_do_not_end_it_early(run):
    batch = run(lambda data: float(data.sample) if number_of(data) >= 9 else 0.0, should_accept=differs, max_rounds=10)
    assert uids(batch) == ["row9", "row10", "row11"]


def test_no_group_at_all_is_an_error_that_names_the_setting():
    with pytest.raises(
        RolloutFailed, match=r"12 groups .* only 0 are(.|\n)*row0: .*\(algorithm\.filter_groups\)"
    ) as caught:
        one_batch(scored(lambda data: 0.5), should_accept=differs, max_rounds=4)
    assert "raise algorithm.max_filter_rounds" in str(caught.value)
    assert "max_retries" not in str(caught.value)


def test_failed_and_filtered_groups_have_different_kinds(run):
    def score(data):
        if number_of(data) == 1:
            raise RewardFailed("no reward")
        return every_third(data)

    batch = run(score, should_accept=differs, max_rounds=10, on_failure="drop")
    assert [each.uid for each in batch.dropped if each.kind != DropKind.FILTERED] == ["row1"]


def test_a_greedy_episode_gives_the_baseline_and_is_not_trained_on(run):
    asked = []

    def greedy(data):
        asked.append(data)
        return 10.0 + number_of(data)

    batch = run(lambda data: 1.0, greedy=scored(greedy))
    assert [group.baseline for group in batch.groups] == [10.0, 11.0, 12.0]
    assert batch.baselines().tolist() == [10.0, 10.0, 11.0, 11.0, 12.0, 12.0]
    assert [each.reward for each in batch.trajectories] == [1.0] * 6
    assert {data.sample for data in asked} == {GREEDY}


def test_a_greedy_episode_that_fails_drops_its_group(run):
    def greedy(data):
        if number_of(data) == 1:
            raise RewardFailed("no baseline")
        return 0.0

    batch = run(lambda data: 1.0, greedy=scored(greedy), on_failure="drop")
    assert uids(batch) == ["row0", "row2", "row3"]
    assert (batch.dropped[0].kind, batch.dropped[0].message) == (DropKind.REWARD_FAILED, "no baseline")


def test_without_a_greedy_episode_there_is_no_baseline(run):
    assert run(lambda data: 1.0).baselines() is None
