"""Sharing a batch out over ranks: the mini-batches of one rank, each with its work spread evenly."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config.schema import LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.learner.balance import balanced_parts
from headwater.learner.partition import workload
from headwater.learner.passes import minibatches
from headwater.rollout.padding import pad_trajectories

examples = settings(deadline=None, max_examples=100)


def data(num_rows: int, samples: int):
    trajectories = [tiny.trajectory(row, uid=f"prompt{row // samples}", sample=row) for row in range(num_rows)]
    return pad_trajectories(trajectories, pad_token_id=0)


def numbers(batch: DataProto) -> list[int]:
    """Which rows of ``data`` these are."""
    return batch.non_tensor_batch["sample"].tolist()


def cost(batch: DataProto) -> float:
    return sum(workload(length) for length in batch.batch["attention_mask"].sum(dim=1).tolist())


def dearest_group(batch: DataProto) -> float:
    uids = batch.non_tensor_batch["uid"]
    return max((cost(batch[uids == uid]) for uid in set(uids)), default=0.0)


def steps(batch: DataProto, config: LearnerConfig) -> list[DataProto]:
    return list(minibatches(batch, config))


@examples
@given(st.integers(4, 40), st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_every_row_goes_to_one_rank(num_rows, samples, num_parts, num_minibatches):
    parts = balanced_parts(data(num_rows, samples), num_parts, num_minibatches=num_minibatches)
    assert len(parts) == num_parts
    assert all(len(part) for part in parts)
    assert sorted(row for part in parts for row in numbers(part)) == list(range(num_rows))
    assert all(numbers(part) == sorted(numbers(part)) for part in parts)


@examples
@given(st.integers(4, 40), st.integers(1, 8), st.integers(1, 4), st.integers(1, 6), st.integers(1, 2))
def test_ranks_together_step_through_the_minibatches_of_one(num_rows, samples, num_parts, num_minibatches, num_epochs):
    batch, config = data(num_rows, samples), LearnerConfig(num_minibatches=num_minibatches, num_epochs=num_epochs)
    parts = balanced_parts(batch, num_parts, num_minibatches=num_minibatches)
    alone = [numbers(each) for each in steps(batch, config)]
    together = zip(*(steps(part, config) for part in parts), strict=True)
    assert [sorted(row for share in shares for row in numbers(share)) for shares in together] == alone
    assert len(alone) == num_minibatches * num_epochs


@examples
@given(st.integers(4, 40), st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_prompts_stay_whole_where_there_are_enough_of_them(num_rows, samples, num_parts, num_minibatches):
    batch, config = data(num_rows, samples), LearnerConfig(num_minibatches=num_minibatches)
    parts = balanced_parts(batch, num_parts, num_minibatches=num_minibatches)
    for whole, *shares in zip(*(steps(each, config) for each in (batch, *parts)), strict=True):
        uids = set(whole.non_tensor_batch["uid"])
        if len(uids) >= num_parts:
            assert sum(len(set(share.non_tensor_batch["uid"])) for share in shares) == len(uids)
        else:  # and where they are too few, a rank goes without only where rows are too few as well
            assert sum(len(share) > 0 for share in shares) == min(num_parts, len(whole))


@examples
@given(st.integers(4, 40), st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_the_work_of_every_step_and_of_the_whole_is_even(num_rows, samples, num_parts, num_minibatches):
    batch, config = data(num_rows, samples), LearnerConfig(num_minibatches=num_minibatches)
    parts = balanced_parts(batch, num_parts, num_minibatches=num_minibatches)
    spreads = []
    for whole, *shares in zip(*(steps(each, config) for each in (batch, *parts)), strict=True):
        costs = [cost(share) for share in shares]
        # The cost of one group decides at worst, that of the fullest rank where this group is all it has.
        spreads.append(max(costs) - min(costs))
        assert spreads[-1] <= dearest_group(whole)
    # What one step left uneven the next ones make up for.
    totals = [cost(part) for part in parts]
    assert max(totals) - min(totals) <= max(spreads)


def test_work_is_even():
    parts = balanced_parts(data(64, 4), 4, num_minibatches=1)
    tokens = [int(part.batch["attention_mask"].sum()) for part in parts]
    assert max(tokens) - min(tokens) < 0.1 * max(tokens)


def test_a_minibatch_of_one_row_goes_to_the_rank_that_has_least():
    parts = balanced_parts(data(3, 1), 2, num_minibatches=3)
    assert sorted(len(part) for part in parts) == [1, 2]
    config = LearnerConfig(num_minibatches=3)
    assert [sorted(map(len, shares)) for shares in zip(*(steps(part, config) for part in parts), strict=True)] == [
        [0, 1],
        [0, 1],
        [0, 1],
    ]


def test_rows_know_their_minibatch_when_some_are_left_out():
    part = balanced_parts(data(12, 2), 1, num_minibatches=2)[0][[0, 1, 2, 11]]
    assert [numbers(each) for each in steps(part, LearnerConfig(num_minibatches=2))] == [[0, 1, 2], [11]]


def test_more_ranks_than_rows_is_an_error():
    with pytest.raises(DataError, match="3 rows cannot fill 4 ranks"):
        balanced_parts(data(3, 1), 4, num_minibatches=1)


@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_a_batch_shared_out_for_other_minibatches_is_an_error(num_minibatches):
    part = balanced_parts(data(12, 2), 2, num_minibatches=2)[0]
    with pytest.raises(DataError, match=f"for 2 mini-batches, but learner.num_minibatches = {num_minibatches}"):
        steps(part, LearnerConfig(num_minibatches=num_minibatches))
