"""What must hold whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.algorithms.advantages import AdvantageInputs
from headwater.algorithms.advantages.grpo import grpo
from headwater.algorithms.aggregate import token_mean
from headwater.algorithms.masked import masked_sum


@st.composite
def batches(draw):
    rows, width = draw(st.integers(2, 12)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = (torch.rand(rows, width, generator=generator) < 0.7).float()
    return torch.randn(rows, width, generator=generator), mask, generator


@settings(deadline=None, max_examples=50)
@given(batches(), st.integers(1, 5))
def test_token_mean_does_not_depend_on_the_cut(batch, size):
    losses, mask, _ = batch
    num_tokens = max(float(mask.sum()), 1.0)
    whole = token_mean(losses, mask, num_tokens)
    parts = sum(
        token_mean(part, kept, num_tokens) for part, kept in zip(losses.split(size), mask.split(size), strict=True)
    )
    torch.testing.assert_close(parts, whole)


@settings(deadline=None, max_examples=50)
@given(batches())
def test_permuting_samples_permutes_grpo_advantages(batch):
    rewards, mask, generator = batch
    groups = torch.randint(0, 3, (len(rewards),), generator=generator)
    order = torch.randperm(len(rewards), generator=generator)
    permuted = grpo(AdvantageInputs(rewards[order], mask[order], groups[order]))
    torch.testing.assert_close(permuted, grpo(AdvantageInputs(rewards, mask, groups))[order])


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1.0, -2.3])
@pytest.mark.parametrize("count", [2, 8, 16, 100])
def test_grpo_of_equal_rewards_is_exactly_zero(reward, count):
    ones = torch.ones(count, 1)
    assert not grpo(AdvantageInputs(reward * ones, ones, torch.zeros(count))).any()


def test_grpo_by_hand():
    # Rewards 1, 0, 0, 1: mean 0.5, unbiased deviation sqrt(1/3).
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    advantages = grpo(AdvantageInputs(rewards, torch.ones(4, 2), torch.zeros(4)))
    torch.testing.assert_close(advantages[0], torch.full((2,), 0.5 / ((1 / 3) ** 0.5 + 1e-6)))
    torch.testing.assert_close(advantages[1], -advantages[0])


def test_masked_entries_may_be_anything():
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
    assert masked_sum(values, torch.eye(2)).item() == 3.0
