"""Splitting a batch over ranks: every row once, mini-batch by mini-batch, balanced by cost, and back in order."""

from __future__ import annotations

import pickle

import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.config.schema import LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.core.dispatch import collect, dispatch
from headwater.learner.engine import minibatches
from headwater.learner.partition import balanced_parts, workload
from headwater.rollout.group import pad_trajectories

examples = settings(deadline=None, max_examples=60)


def data(num_rows: int, samples: int = 1) -> DataProto:
    trajectories = [tiny.trajectory(row, uid=f"prompt{row // samples}", sample=row) for row in range(num_rows)]
    return pad_trajectories(trajectories, pad_token_id=0)


def split(batch: DataProto, num_parts: int, num_minibatches: int = 1) -> list[DataProto]:
    return dispatch(batch, balanced_parts(batch, num_parts, num_minibatches=num_minibatches))


def numbers(batch: DataProto) -> list[int]:
    """Which rows of ``data`` these are."""
    return batch.non_tensor_batch["sample"].tolist()


def cost(batch: DataProto) -> float:
    return sum(workload(length) for length in batch.batch["attention_mask"].sum(dim=1).tolist())


def largest_group(batch: DataProto) -> float:
    uids = batch.non_tensor_batch["uid"]
    return max((cost(batch[uids == uid]) for uid in set(uids)), default=0.0)


@examples
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.integers(1, 2))
def test_ranks_together_take_the_steps_of_one_rank(num_rows, samples, num_parts, num_minibatches, num_epochs):
    batch, config = data(num_rows, samples), LearnerConfig(num_minibatches=num_minibatches, num_epochs=num_epochs)
    parts = split(batch, num_parts, num_minibatches)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in numbers(part)) == list(range(num_rows))
    spreads = []
    steps = [list(minibatches(each, config)) for each in (batch, *parts)]
    assert all(len(each) == num_minibatches * num_epochs for each in steps)
    for whole, *shares in zip(*steps, strict=True):
        assert sorted(row for share in shares for row in numbers(share)) == numbers(whole)
        uids = set(whole.non_tensor_batch["uid"])
        if len(uids) >= num_parts:  # prompts stay whole
            assert sum(len(set(share.non_tensor_batch["uid"])) for share in shares) == len(uids)
        else:  # a rank has no row only if there are too few rows
            assert sum(len(share) > 0 for share in shares) == min(num_parts, len(whole))
        costs = [cost(share) for share in shares]
        spreads.append(max(costs) - min(costs))
        assert spreads[-1] <= largest_group(whole)
    totals = [cost(part) for part in parts]
    assert max(totals) - min(totals) <= max(spreads), "later mini-batches compensate for earlier ones"


@examples
@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_results_come_back_in_order(num_rows, num_parts, num_minibatches, random):
    batch = data(20)[:num_rows]
    outputs = []
    for part in split(batch, num_parts, num_minibatches):
        rows = list(range(len(part)))
        random.shuffle(rows)  # a rank may reorder its rows
        part = pickle.loads(pickle.dumps(part))[rows]
        outputs.append(part.with_columns(tensors={"double": 2 * torch.tensor(numbers(part), dtype=torch.long)}))
    random.shuffle(outputs)
    collected = collect(outputs)
    assert collected.batch["double"].tolist() == [2 * row for row in range(num_rows)]
    collected.pop(batch_keys=["double"])
    assert collected.equals(batch)


def test_work_is_even():
    tokens = [int(part.batch["attention_mask"].sum()) for part in split(data(64, 4), 4)]
    assert max(tokens) - min(tokens) < 0.1 * max(tokens)


def test_rows_keep_their_minibatch_when_some_are_left_out():
    part = split(data(12, 2), 1)[0][[0, 1, 2, 11]]
    assert [numbers(each) for each in minibatches(part, LearnerConfig(num_minibatches=2))] == [[0, 1, 2], [11]]
