"""Trajectories become padded batches and nothing is lost on the way."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.rollout.padding import pad_trajectories


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=8))
def test_every_trajectory_can_be_read_back(seeds):
    trajectories = [tiny.trajectory(seed) for seed in seeds]
    data = pad_trajectories(trajectories, pad_token_id=3)
    width = data.batch["response_mask"].shape[1]
    for row, each in zip(data, trajectories, strict=True):
        tensors, length = row.tensors, len(each.response_tokens)
        real = tensors["attention_mask"].bool()
        assert tensors["input_ids"][real].tolist() == list(each.tokens)
        assert tensors["position_ids"][real].tolist() == list(range(len(each.tokens)))
        assert tensors["input_ids"][-width:][:length].tolist() == list(each.response_tokens)
        assert tensors["response_mask"].tolist() == list(each.loss_mask[each.prompt_length :]) + [0] * (width - length)
        assert tensors["versions"].tolist() == list(each.versions[each.prompt_length :]) + [-1] * (width - length)
        assert tensors["rewards"].sum().item() == pytest.approx(each.reward)
        assert (tensors["input_ids"][~real] == 3).all()


def test_no_trajectories_make_an_empty_batch():
    assert len(pad_trajectories([], pad_token_id=0)) == 0
