"""Advantage estimators on numbers worked out by hand, and what they refuse."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs
from headwater.algorithms.advantages.gae_turn import gae_turn
from headwater.algorithms.advantages.gdpo import gdpo
from headwater.algorithms.advantages.grpo import grpo
from headwater.algorithms.advantages.grpo_passk import grpo_passk
from headwater.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from headwater.algorithms.advantages.rloo import rloo
from headwater.core.errors import DataError, MissingColumn


def outcome(*scores):
    rewards = torch.tensor(scores)[:, None]
    return AdvantageInputs(rewards, torch.ones_like(rewards), torch.zeros(len(scores)))


def test_grpo_of_equal_rewards_is_exactly_zero():
    for reward, count in product((0.1, 0.3, 0.7, 0.9, 1.0, -2.3), (2, 6, 8, 16, 100)):
        assert not grpo(outcome(*[reward] * count)).advantages.any(), (reward, count)


def test_grpo_by_hand():
    # Rewards 1, 0, 0, 1: mean 0.5, unbiased deviation sqrt(1/3).
    advantages = grpo(outcome(1.0, 0.0, 0.0, 1.0)).advantages[:, 0]
    torch.testing.assert_close(advantages[0], torch.tensor(0.5 / ((1 / 3) ** 0.5 + 1e-6)))
    torch.testing.assert_close(advantages[1], -advantages[0])


def test_dr_grpo_leaves_the_deviation_out():
    advantages = grpo(outcome(1.0, 0.0, 0.0, 1.0), normalize_by_std=False).advantages[:, 0]
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_an_untrained_sample_still_counts_in_its_group():
    rewards, mask = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    advantages = grpo(AdvantageInputs(rewards, mask, torch.zeros(2)), normalize_by_std=False).advantages
    assert advantages.tolist() == [[0.0], [-0.5]]


def test_rloo_by_hand():
    # 3 against the mean of 1 and 2.
    assert rloo(outcome(3.0, 1.0, 2.0)).advantages[:, 0].tolist() == [1.5, -1.5, 0.0]
    assert rloo(outcome(3.0)).advantages.tolist() == [[0.0]]
    assert rloo(outcome(3.0), singleton="score").advantages.tolist() == [[3.0]]


def test_pass_at_k_credits_only_a_clear_winner():
    assert grpo_passk(outcome(3.0, 1.0, 2.0), normalize_by_std=False).advantages[:, 0].tolist() == [1.0, 0.0, 0.0]
    assert not grpo_passk(outcome(3.0, 3.0, 2.0)).advantages.any()
    with pytest.raises(DataError, match="num_samples_per_prompt"):
        grpo_passk(outcome(1.0))


def test_turn_level_gae_by_hand():
    # Two turns of two tokens with an observation between; the masked token's reward and value must not count.
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.0, 1.0, 100.0, 0.0, 2.0]]),
        mask=mask,
        groups=torch.zeros(1),
        values=torch.tensor([[0.5, 9.0, 100.0, 1.0, 9.0]]),
        turns=torch.tensor([[0, 0, -1, 1, 1]]),
    )
    result = gae_turn(inputs, gamma=0.5, lam=0.5, whitened=False)
    # Turn 1: 2 - 1 = 1. Turn 0: 1 + 0.5·1 - 0.5 = 1, plus 0.25·1.
    assert result.advantages.tolist() == [[1.25, 1.25, 0.0, 1.0, 1.0]]
    assert result.returns.tolist() == [[1.75, 1.75, 0.0, 2.0, 2.0]]


def test_turn_level_gae_passes_over_turns_a_sample_does_not_have():
    # The second sample's only turn has number 1: what would be its turn 0 left no token.
    ones = torch.ones(2, 2)
    inputs = AdvantageInputs(
        rewards=ones, mask=ones, groups=torch.zeros(2), values=torch.zeros(2, 2), turns=torch.tensor([[0, 1], [1, 1]])
    )
    assert gae_turn(inputs, whitened=False).advantages.tolist() == [[2.0, 1.0], [2.0, 2.0]]


def test_a_missing_column_is_named():
    needed = {
        "gae": "values",
        "gae_turn": "values",
        "remax": "baselines",
        "gdpo": "reward_parts",
        "optimal_token_baseline": "old_logprobs",
    }
    for name, column in needed.items():
        with pytest.raises(MissingColumn, match=f"{name} needs the column '{column}'"):
            ADVANTAGES.resolve(name)(outcome(1.0, 0.0))


def test_gdpo_wants_one_weight_per_part():
    ones = torch.ones(2, 1)
    inputs = AdvantageInputs(ones, ones, torch.zeros(2), reward_parts=torch.ones(2, 3))
    with pytest.raises(DataError, match="reward_weights"):
        gdpo(inputs, reward_weights=[1.0, 2.0])


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="values has shape"):
        AdvantageInputs(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2), values=torch.ones(2, 2))


def test_a_baseline_per_token_removes_equal_scores_exactly():
    """All but the tail of the longest, which nothing is compared with; ``zero_tail: false`` makes it its own."""
    for score, skip_masked in product((0.1, 0.7, 0.9, -2.3), (False, True)):
        check_equal_scores(score, skip_masked)


def check_equal_scores(score, skip_masked):
    lengths = torch.tensor([3, 5, 7, 5])
    mask = (torch.arange(7) < lengths[:, None]).float()
    rewards = torch.zeros(4, 7).index_put((torch.arange(4), lengths - 1), torch.tensor(score))
    generator = torch.Generator().manual_seed(0)
    columns = {
        "old_logprobs": -torch.rand(4, 7, generator=generator),
        "sum_pi_squared": torch.rand(4, 7, generator=generator),
    }
    inputs = AdvantageInputs(rewards, mask, torch.zeros(4), **columns)
    with_tail = optimal_token_baseline(inputs, skip_masked=skip_masked).advantages
    assert with_tail.nonzero().tolist() == [[2, 5], [2, 6]]
    assert with_tail[2, 5:].tolist() == pytest.approx([score] * 2)
    assert not optimal_token_baseline(inputs, skip_masked=skip_masked, zero_tail=False).advantages.any()
