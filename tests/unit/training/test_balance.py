"""Sharing a batch out over ranks."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.rollout.padding import pad_trajectories
from headwater.training.balance import balanced_parts


def data(num_rows: int, samples: int):
    trajectories = [tiny.trajectory(row, uid=f"prompt{row // samples}", sample=row) for row in range(num_rows)]
    return pad_trajectories(trajectories, pad_token_id=0)


@settings(deadline=None, max_examples=50)
@given(st.integers(4, 40), st.integers(1, 8), st.integers(1, 4))
def test_every_row_goes_to_one_rank_and_prompts_stay_whole(num_rows, samples, num_parts):
    batch = data(num_rows, samples)
    parts = balanced_parts(batch, num_parts)
    assert len(parts) == num_parts
    assert all(len(part) for part in parts)
    assert sorted(row for part in parts for row in part.non_tensor_batch["sample"]) == list(range(num_rows))
    if -(-num_rows // samples) >= num_parts:
        owners = [set(part.non_tensor_batch["uid"]) for part in parts]
        assert sum(len(each) for each in owners) == len(set().union(*owners))


def test_work_is_even():
    parts = balanced_parts(data(64, 4), 4)
    tokens = [int(part.batch["attention_mask"].sum()) for part in parts]
    assert max(tokens) - min(tokens) < 0.1 * max(tokens)


def test_more_ranks_than_rows_is_an_error():
    with pytest.raises(DataError, match="3 items cannot fill 4 parts"):
        balanced_parts(data(3, 1), 4)
