"""Retries, partial groups, and errors that must not end the rollout thread."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from rollout.executor_parts import Rows, Scripted, executor_of, ok, one_batch, uids

import headwater.rollout.flight as flight_module
from headwater.core.errors import RewardFailed, RolloutFailed


def failing(num_failures: int, sample: int = 1, uid: str = "row1", error: type[BaseException] = RewardFailed):
    """An episode that fails ``num_failures`` times before it succeeds."""
    tries: Counter[str] = Counter()

    def outcome(data):
        if data.prompt.uid == uid and data.sample == sample:
            tries[uid] += 1
            if tries[uid] <= num_failures:
                raise error("the reward service is restarting")
        return ok(data)

    return Scripted(outcome)


def test_a_group_that_failed_is_retried(caplog):
    for on_failure in ("stop", "drop"):
        caplog.clear()
        batch = one_batch(failing(2), on_failure=on_failure, max_retries=2)
        assert uids(batch) == ["row0", "row1", "row2"]
        assert not batch.dropped
        assert caplog.text.count("row row1 is retried") == 2, on_failure


def test_the_number_of_retries_is_limited():
    with pytest.raises(RewardFailed, match="restarting"):
        one_batch(failing(3), max_retries=2)
    batch = one_batch(failing(3), max_retries=2, on_failure="drop")
    assert uids(batch) == ["row0", "row2", "row3"]
    assert [(each.uid, each.message) for each in batch.dropped] == [("row1", "the reward service is restarting")]


def test_a_group_continues_without_the_samples_that_failed(caplog):
    batch = one_batch(failing(99), num_samples=3, on_failure="drop", allow_partial_groups=True)
    assert uids(batch) == ["row0", "row1", "row2"]
    assert [len(group.trajectories) for group in batch.groups] == [3, 2, 3]
    assert [group.num_lost for group in batch.groups] == [0, 1, 0]
    assert [each.sample for each in batch.groups[1].trajectories] == [0, 2]
    assert "row row1 continues without a sample" in caplog.text


def test_one_sample_alone_is_no_group():
    batch = one_batch(failing(99), num_samples=2, on_failure="drop", allow_partial_groups=True)
    assert uids(batch) == ["row0", "row2", "row3"]
    assert batch.dropped[0].uid == "row1"


def test_code_that_would_end_the_thread_is_a_failure():
    for error in (SystemExit, KeyboardInterrupt):
        with pytest.raises(RolloutFailed, match=f"row row1 raised {error.__name__}"):
            one_batch(failing(1, error=error))


def test_an_evaluation_that_hangs_is_limited_too(monkeypatch):
    monkeypatch.setattr(flight_module, "_WATCH_EVERY_S", 0.02)

    async def never(data):
        await asyncio.sleep(3600)

    with (
        executor_of(Scripted(never), episode_timeout_s=0.1) as executor,
        pytest.raises(RolloutFailed, match=r"longer than rollout.episode_timeout_s"),
    ):
        executor.rollout_batch(Rows().take(2))


def test_messages_do_not_accumulate_in_the_status():
    def outcome(data):
        if int(data.prompt.uid.removeprefix("row")) % 2:
            raise RewardFailed(f"no reward for {data.prompt.uid}")
        return ok(data)

    with executor_of(Scripted(outcome), on_failure="drop", batch_size=20) as executor:
        executor.prepare_batch(Rows())
        drops = executor.ledger.drops()
        assert list(drops) == ["reward_failed"]
        assert drops["reward_failed"]["count"] == executor.ledger.counts().dropped
