"""Trajectories become padded batches and nothing is lost on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.records import Trajectory
from headwater.rollout.group import Group, add_to_scores, num_replies, num_turns, pad_trajectories, score_columns


@settings(deadline=None, max_examples=25)
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


def test_an_empty_response_keeps_its_reward():
    whole = tiny.trajectory(1)
    length = whole.prompt_length
    empty = replace(
        whole,
        tokens=whole.tokens[:length],
        loss_mask=whole.loss_mask[:length],
        logprobs=whole.logprobs[:length],
        versions=whole.versions[:length],
        reward=-0.5,
    )
    for others in ([], [whole]):
        rewards = pad_trajectories([empty, *others], pad_token_id=0).batch["rewards"]
        assert rewards.sum(dim=1).tolist() == pytest.approx([-0.5, *(each.reward for each in others)])


def two_turns(*versions: int):
    first, second = versions
    before = tiny.prompt().tokens
    count = len(before)
    return Trajectory(
        uid="row",
        sample=0,
        tokens=(*before, 7, 8, 5, 9, 5),
        prompt_length=count,
        loss_mask=(0,) * count + (1, 1, 0, 1, 0),
        logprobs=(0.0,) * count + (-1.0, -1.0, 0.0, -1.0, 0.0),
        versions=(-1,) * count + (first, first, -1, second, -1),
        reward=0.75,
        stop_reason="stop",
        turn_rewards=(0.25, 0.5),
    )


def test_rewards_of_turns_stand_where_each_turn_ends():
    data = pad_trajectories([two_turns(0, 0)], pad_token_id=0)
    assert data.batch["rewards"].tolist() == [[0.0, 0.25, 0.0, 0.5, 0.0]]


def test_a_turn_that_became_too_old_keeps_its_reward_and_its_place():
    group, num_masked = Group(tiny.prompt(), (two_turns(3, 4),)).without_older(4)
    assert num_masked == 2
    data = pad_trajectories(group.trajectories, pad_token_id=0)
    assert data.batch["response_mask"].tolist() == [[0.0, 0.0, 0.0, 1.0, 0.0]]
    assert data.batch["rewards"].tolist() == [[0.0, 0.25, 0.0, 0.5, 0.0]]


def test_the_reward_of_a_turn_whose_last_token_is_not_trained_reaches_the_others():
    each = two_turns(3, 4)
    mask = list(each.loss_mask)
    mask[each.turn_ends[0]] = 0
    data = pad_trajectories([replace(each, loss_mask=tuple(mask))], pad_token_id=0)
    assert data.batch["response_mask"].tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0]]
    assert data.batch["rewards"].tolist() == [[0.25, 0.0, 0.0, 0.5, 0.0]]


def test_an_added_score_is_on_the_last_trained_token_or_else_on_the_last_token():
    for oldest_left, column in ((4, 3), (5, 4)):
        group, _ = Group(tiny.prompt(), (two_turns(3, 4),)).without_older(oldest_left)
        mask = pad_trajectories(group.trajectories, pad_token_id=0).batch["response_mask"].numpy()
        columns = torch.from_numpy(score_columns(group.trajectories, mask))
        added = add_to_scores(torch.zeros(1, 5), torch.tensor([0.5]), columns)
        assert added.tolist() == [[0.5 if each == column else 0.0 for each in range(5)]], oldest_left


def test_turns_are_counted_together_as_one_by_one():
    given = [two_turns(3, 4), tiny.trajectory(1), replace(two_turns(1, 2), info={"num_turns": 7})]
    counts = [num_replies(given[0]), num_replies(given[1]), 7]
    assert num_turns(given) == counts
    assert num_turns(given[2:]) == [7]
    assert counts[0] == 2
