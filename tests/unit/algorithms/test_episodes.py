"""Groups are compared over episodes: the pieces of an episode share its weight."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from algorithms.strategies import advantage_inputs, batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs
from headwater.algorithms.groups import Groups, piece_weights
from headwater.algorithms.masked import StepTotals, aggregate
from headwater.algorithms.normalize import normalize, normalize_rewards

ROOT_HALF = 0.5**0.5


def advantages(name: str, scores, episodes, lengths=None, groups=None, **settings) -> list[float]:
    """One advantage per sample, from its first token."""
    lengths = lengths or [1] * len(scores)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = torch.tensor(scores)
    ids = torch.tensor(groups or [0] * len(scores))
    inputs = AdvantageInputs(rewards, mask, ids, episodes=torch.tensor(episodes))
    return ADVANTAGES.resolve(name)(inputs, **settings).advantages[:, 0].tolist()


def test_one_failure_in_three_pieces_counts_once():
    scores, episodes = [1.0, 0.0, 0.0, 0.0], [0, 1, 1, 1]
    # The scores of the two episodes are 1 and 0: mean 1/2, deviation sqrt(1/2).
    assert advantages("grpo", scores, episodes) == pytest.approx([ROOT_HALF] + [-ROOT_HALF] * 3, rel=1e-5)
    assert advantages("grpo", scores, episodes, normalize_by_std=False) == [0.5, -0.5, -0.5, -0.5]
    assert advantages("rloo", scores, episodes) == [1.0, -1.0, -1.0, -1.0]
    # Two episodes, one of them with a score: scale 2.
    assert advantages("gpg", scores, episodes) == [1.0, -1.0, -1.0, -1.0]
    assert advantages("grpo_passk", scores, episodes, normalize_by_std=False) == [1.0, 0.0, 0.0, 0.0]
    # 2 tokens with score 1 and 1 + 1 + 2 with score 0: baseline 1/3.
    opo = advantages("opo", scores, episodes, lengths=[2, 1, 1, 2])
    assert opo == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1 / 3])


def test_pieces_with_different_scores_are_compared_with_the_mean_of_episodes():
    scores, episodes = [1.0, 0.0, 1.0], [5, 3, 3]
    # The second episode scores 1/2, so the group's mean is 3/4.
    assert advantages("grpo", scores, episodes, normalize_by_std=False) == [0.25, -0.75, 0.25]
    # Leave-one-out: the first is compared with 1/2, both pieces of the second with 1.
    assert advantages("rloo", scores, episodes) == [0.5, -1.0, 0.0]
    # The whole of the best episode is credited with its lead over 1/2.
    assert advantages("grpo_passk", scores, episodes, normalize_by_std=False) == [0.5, 0.0, 0.0]


def test_equal_episodes_of_different_pieces_do_not_divide_by_zero():
    made = advantages("grpo", [0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1])
    assert made == pytest.approx([-ROOT_HALF, ROOT_HALF, -ROOT_HALF, ROOT_HALF], rel=1e-5)


def test_an_episode_that_is_alone_stays_alone_in_pieces():
    assert advantages("grpo", [0.5, 0.5], [0, 0]) == pytest.approx([0.5, 0.5], rel=1e-5)
    assert advantages("rloo", [0.5, 0.5], [0, 0]) == [0.0, 0.0]
    with pytest.raises(Exception, match="a group has only one"):
        advantages("grpo_passk", [0.5, 0.5], [0, 0])


def test_rewards_are_normalised_over_episodes():
    rewards = torch.tensor([[1.0], [0.0], [0.0]])
    chosen = {"mean_level": "group", "std_level": "group", "unbiased": True, "epsilon": 0.0}
    grouping = {"groups": torch.zeros(3), "episodes": torch.tensor([0, 1, 1])}
    columns = torch.zeros(3, dtype=torch.long)
    made = normalize_rewards(rewards, columns, **grouping, leave_one_out=False, **chosen)
    assert made[:, 0].tolist() == pytest.approx([ROOT_HALF, -ROOT_HALF, -ROOT_HALF])
    chosen["std_level"] = "none"
    made = normalize_rewards(rewards, columns, **grouping, leave_one_out=True, **chosen)
    assert made[:, 0].tolist() == [1.0, -1.0, -1.0]


def test_a_piece_weighs_its_share_of_the_trained_pieces():
    mask = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    assert piece_weights(torch.tensor([4, 7, 7, 7]), mask).tolist() == [1.0, 0.5, 0.5, 0.5]
    assert piece_weights(torch.tensor([4, 7, 8, 1]), mask) is None


def test_advantages_are_normalised_over_episodes():
    """One episode with advantage 1 and one with -1 in three pieces: mean 0 and deviation sqrt(2)."""
    values, mask, groups = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]]), torch.ones(4, 1), torch.zeros(4)
    given = {"mask": mask, "groups": groups, "weights": piece_weights(torch.tensor([0, 1, 1, 1]), mask), "epsilon": 0.0}
    for level in ("batch", "group"):
        made = normalize(values, mean_level=level, std_level=level, **given)
        assert made[:, 0].tolist() == pytest.approx([ROOT_HALF] + [-ROOT_HALF] * 3)
    # The others of a piece are the first episode and two thirds of its own: (1 - 2/3) / (5/3).
    made = normalize(values, mean_level="batch", std_level="none", leave_one_out=True, **given)
    assert made[:, 0].tolist() == pytest.approx([2.0] + [-1.2] * 3)


LOSSES = [[2.0, 4.0], [1.0, 3.0], [5.0, 100.0]]
LOSS_MASK = [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
BY_HAND = {
    # Two episodes, the second in two pieces of weight 1/2: the sums 6, 4, 5 and the means 3, 2, 5.
    "seq-mean-token-sum": (6 + (4 + 5) / 2) / 2,
    "seq-mean-token-sum-norm": (6 + (4 + 5) / 2) / 2 / 10,
    "seq-mean-token-mean": (3 + (2 + 5) / 2) / 2,
    "token-mean": 15 / 5,
    "token-sum": 15.0,
}


@pytest.mark.parametrize(("mode", "expected"), BY_HAND.items())
def test_a_mean_over_sequences_counts_episodes(mode, expected):
    losses, mask = torch.tensor(LOSSES), torch.tensor(LOSS_MASK)
    weights = piece_weights(torch.tensor([0, 1, 1]), mask)
    totals = StepTotals.of(mask, sequence_weights=weights, width=10.0)
    assert (totals.num_tokens, totals.num_sequences) == (5.0, 2.0)
    assert float(aggregate(losses, mask, mode, totals, weights)) == pytest.approx(expected)


def gradient(losses, mask, mode, weights):
    leaf = losses.clone().requires_grad_()
    totals = StepTotals.of(mask, sequence_weights=weights, width=10.0)
    return torch.autograd.grad(aggregate(leaf, mask, mode, totals, weights), leaf)[0]


@settings(deadline=None, max_examples=20)
@given(batches(min_group=2), st.integers(0, 20), st.integers(2, 5))
def test_equal_pieces_of_one_episode_change_no_other_in_the_loss(batch, row, num_pieces):
    mask, values = batch.mask, batch.normal()
    num_rows = len(mask)
    row %= num_rows
    rows = torch.cat([torch.arange(row), torch.full((num_pieces,), row), torch.arange(row + 1, num_rows)])
    others = rows != row
    weights = piece_weights(rows, mask[rows])
    for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
        expected = gradient(values, mask, mode, None)
        made = gradient(values[rows], mask[rows], mode, weights)
        assert_close(made[others], expected[rows[others]], msg=lambda text, mode=mode: f"{mode}: {text}")
        assert_close(made[~others].sum(dim=0), expected[row])
    for level in ("batch", "group"):
        chosen = {"mean_level": level, "std_level": level}
        expected = normalize(values, mask=mask, groups=batch.groups, **chosen)
        made = normalize(values[rows], mask=mask[rows], groups=batch.groups[rows], weights=weights, **chosen)
        assert_close(made, expected[rows], rtol=1e-4, atol=1e-4)


def test_numbers_of_episodes_may_be_any_and_in_any_order():
    groups = Groups.of(torch.tensor([7, 7, 4, 7, 4]), torch.tensor([9, 2, 5, 9, 5]))
    assert groups.size.tolist() == [2, 2, 1, 2, 1]
    assert groups.episodes.first.tolist() == [0, 1, 2]
    assert groups.of_episode(torch.tensor([1.0, 5.0, 2.0, 3.0, 2.0])).tolist() == [2.0, 5.0, 2.0, 2.0, 2.0]
    assert groups.sum(torch.tensor([1.0, 5.0, 2.0, 3.0, 2.0])).tolist() == [7.0, 7.0, 2.0, 7.0, 2.0]


def cut(inputs: AdvantageInputs, row: int, num_pieces: int, *, copies: bool) -> AdvantageInputs:
    """``row`` in pieces of the same reward, in its place: each with some of its tokens, or each a copy of it."""
    num_rows, width = inputs.mask.shape
    rows = torch.cat([torch.arange(row), torch.full((num_pieces,), row), torch.arange(row + 1, num_rows)])
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    given = {name: value[rows] for name, value in columns.items() if value is not None}
    given["episodes"] = rows
    if not copies:
        mask = given["mask"].clone()
        for piece in range(num_pieces):
            mask[row + piece] *= (torch.arange(width) * num_pieces // width == piece).float()
        given["mask"] = mask
    return AdvantageInputs(**given)


EXACT = ["grpo", "grpo_passk", "rloo", "gpg", "opo"]
WHITENED = ["reinforce_plus_plus_baseline", "gdpo"]


@settings(deadline=None, max_examples=20)
@given(batches(min_group=2), st.integers(0, 20), st.integers(2, 5))
def test_cutting_an_episode_changes_no_other(batch, row, num_pieces):
    inputs = replace(advantage_inputs(batch), episodes=None)
    row %= len(inputs.mask)
    others = [at for at in range(len(inputs.mask)) if at != row]
    for name in [*EXACT, *WHITENED, "optimal_token_baseline"]:
        estimator = ADVANTAGES.resolve(name)
        expected = estimator(inputs).advantages
        in_pieces = cut(inputs, row, num_pieces, copies=name == "optimal_token_baseline")
        made = estimator(in_pieces).advantages
        kept = made[[at if at < row else at + num_pieces - 1 for at in others]]
        pieces = made[row : row + num_pieces]
        if name in EXACT:
            assert torch.equal(kept, expected[others]), name
            whole = pieces.sum(dim=0)  # each token is in one piece
            assert torch.equal(whole, expected[row]), name
        else:
            assert_close(kept, expected[others], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@settings(deadline=None, max_examples=20)
@given(batches(min_group=2))
def test_whole_episodes_are_bitwise_as_without_numbers(batch):
    inputs = advantage_inputs(batch)
    numbered = replace(inputs, episodes=torch.arange(len(inputs.mask)).flip(0))
    for name in ADVANTAGES.names():
        estimator = ADVANTAGES.resolve(name)
        assert torch.equal(estimator(replace(inputs, episodes=None)).advantages, estimator(numbered).advantages), name
