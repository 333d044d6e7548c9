"""Normalised rewards and advantages in the loop, held against hand-made numbers.

AReaL's vectors run through the same code, in ``algorithms/oracle_pipeline.py``.
"""

from __future__ import annotations

from dataclasses import replace

import tiny
import torch
from torch.testing import assert_close
from trainer.experience_parts import batch, policy_logprobs, scores, training, trajectory, with_logprobs

from headwater.rollout.group import Group, RolloutBatch

REWARDS, ADVANTAGES = "algorithm.normalize_rewards", "algorithm.normalize_advantages"
PLAIN_RETURNS = ["algorithm.advantage=reinforce_plus_plus", "algorithm.advantage_args.whitened=false"]


CUT_OFF = {"stop_reason": "length"}


def test_normalised_scores_stand_where_the_rewards_did_and_before_the_divergence():
    """Rewards 1 and 3 minus the mean of the other are -2 and 2."""
    rollouts = batch(num_groups=1, num_samples=2)
    rewards = (1.0, 3.0)
    (group,) = rollouts.groups
    samples = [replace(each, reward=reward) for each, reward in zip(group.trajectories, rewards, strict=True)]
    parts = training(
        *PLAIN_RETURNS, f"{REWARDS}.mean_level=group", f"{REWARDS}.leave_one_out=true", "algorithm.kl_in_reward=0.1"
    )
    made = parts.experience.make(RolloutBatch((replace(group, trajectories=tuple(samples)),)), version=0).data.batch
    divergence = made["rewards"] - torch.tensor([[-2.0, 0.0], [0.0, 2.0]])
    assert (divergence != 0).equal(made["response_mask"] != 0)
    assert divergence.abs().max() < 1.0


def test_rewards_of_turns_keep_their_places():
    """Scores 1 and 3 less their mean of 2, over a deviation of sqrt(2); the turns end at the first and last token."""
    prompt, mask = tiny.prompt(), (1, 0, 1, 1)
    samples = [
        trajectory("row", sample, prompt.tokens, 4, loss_mask=mask, reward=sum(turns), turn_rewards=turns)
        for sample, turns in enumerate([(1.0, 0.0), (1.0, 2.0)])
    ]
    parts = training(*PLAIN_RETURNS, f"{REWARDS}={{mean_level: group, std_level: group}}")
    made = parts.experience.make(RolloutBatch((Group(prompt, tuple(samples)),)), version=0).data.batch
    expected = torch.tensor([[1.0, 0.0, 0.0, -2.0], [1.0, 0.0, 0.0, 0.0]]) / 2**0.5
    assert_close(made["rewards"], expected, atol=1e-4, rtol=0.0)


def test_scores_are_scaled_and_clipped_where_they_are():
    """Scores 1 and 3: (1 - 2)·2 = -2 and (3 - 2)·2 = 2, clipped to ±1.5; the turns before are only scaled."""
    prompt, mask = tiny.prompt(), (1, 0, 1, 1)
    samples = [
        trajectory("row", sample, prompt.tokens, 4, loss_mask=mask, reward=sum(turns), turn_rewards=turns, **fields)
        for sample, (turns, fields) in enumerate([((1.0, 0.0), {}), ((1.0, 2.0), {}), ((1.0, 2.0), CUT_OFF)])
    ]
    parts = training(*PLAIN_RETURNS, "reward={bias: -2, scale: 2, clip: 1.5, zero_unfinished: true}")
    made = parts.experience.make(RolloutBatch((Group(prompt, tuple(samples)),)), version=0).data.batch
    assert made["rewards"].tolist() == [[2.0, 0.0, 0.0, -3.5], [2.0, 0.0, 0.0, -0.5], [0.0] * 4]


def test_a_sample_that_is_left_alone_of_its_group_follows_areal():
    """Its deviation is 1, its own mean leaves 0, and the mean of no other values is 0. All scores: 0.2, 1 and 3."""
    pair, alone = batch(num_groups=2, num_samples=2).groups
    alone = replace(alone, trajectories=(replace(alone.trajectories[0], reward=0.2),))
    scored = [replace(each, reward=reward) for each, reward in zip(pair.trajectories, (1.0, 3.0), strict=True)]
    rollouts = RolloutBatch((replace(pair, trajectories=tuple(scored)), alone))
    for levels, expected in [
        ("mean_level: group, std_level: group", 0.0),
        ("mean_level: group, std_level: group, leave_one_out: true", 0.2),
        ("mean_level: batch, std_level: group", 0.2 - 1.4),
        ("std_level: group", 0.2),
    ]:
        made = training(*PLAIN_RETURNS, f"{REWARDS}={{{levels}}}").experience.make(rollouts, version=0).data.batch
        assert_close(made["rewards"][2].sum(), torch.tensor(expected), atol=1e-4, rtol=0.0)
        assert made["rewards"][:2].sum(dim=1).abs().min() > 0


def test_advantages_of_an_estimator_are_normalised_over_all_trained_tokens():
    """Of grpo without its deviation: what is left is the same numbers on the scale of the batch."""
    settings = ["algorithm.advantage_args.normalize_by_std=false"]
    plain = training(*settings).experience.make(batch(), version=0).data.batch
    made = training(*settings, f"{ADVANTAGES}.std_level=batch", f"{ADVANTAGES}.mean_level=batch")
    columns = made.experience.make(batch(), version=0).data.batch
    kept = columns["response_mask"] != 0
    values = plain["advantages"][kept]
    assert_close(columns["advantages"][kept], (values - values.mean()) / (values.std() + 1e-5))
    assert not columns["advantages"][~kept].any()
    assert_close(columns["returns"], plain["returns"])
    assert_close(columns["rewards"].sum(dim=1), scores(batch()))


def test_pieces_of_an_episode_share_its_weight_in_the_statistics_and_the_loss():
    """Scores 1 and, in three pieces, -1: the mean over episodes is 0, and their deviation sqrt(2)."""
    prompt = tiny.prompt()
    pieces = [
        trajectory("row", sample, prompt.tokens, 2, reward=reward)
        for sample, reward in [(0, 1.0), (1, -1.0), (1, -1.0), (1, -1.0)]
    ]
    # Two tokens each: four in all count, of which one is taken off for the unbiased deviation.
    parts = training(*PLAIN_RETURNS, f"{ADVANTAGES}={{mean_level: batch, std_level: batch}}")
    made = parts.experience.make(RolloutBatch((Group(prompt, tuple(pieces)),)), version=0).data.batch
    expected = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]]).expand(4, 2) * (3 / 4) ** 0.5
    assert_close(made["advantages"], expected, atol=1e-4, rtol=0.0)
    assert_close(made["sequence_weights"], torch.tensor([1.0, *[1 / 3] * 3]))
    whole = parts.experience.make(batch(), version=0).data.batch
    assert "sequence_weights" not in whole


def test_the_weights_of_pieces_count_only_what_corrections_kept():
    prompt = tiny.prompt()
    pieces = [trajectory("row", sample, prompt.tokens, 2) for sample in (0, 1, 1)]
    rollouts = RolloutBatch((Group(prompt, tuple(pieces)),))
    parts = training("algorithm.corrections=[m2po]", "algorithm.old_logprobs=recompute")
    logprobs = policy_logprobs(parts, rollouts)
    logprobs[1] -= 5.0  # the first piece of the second episode is rejected
    made = parts.experience.make(with_logprobs(rollouts, logprobs), version=0).data.batch
    assert made["response_mask"].sum(dim=1).tolist() == [2.0, 0.0, 2.0]
    assert made["sequence_weights"][[0, 2]].tolist() == [1.0, 1.0]


def test_every_setting_of_a_normalisation_changes_its_numbers():
    for level, more in [
        ("mean", "algorithm.normalize_rewards.leave_one_out=true"),
        ("std", "algorithm.normalize_rewards.unbiased=false"),
        ("std", "algorithm.normalize_rewards.epsilon=0.5"),
        ("mean", "algorithm.normalize_advantages.leave_one_out=true"),
        ("std", "algorithm.normalize_advantages.unbiased=false"),
        ("std", "algorithm.normalize_advantages.epsilon=0.5"),
    ]:
        section = ".".join(more.split(".")[:2])
        column = section.rpartition("_")[2]
        given = [f"{section}.{level}_level=batch"], [f"{section}.{level}_level=batch", more]
        plain, changed = (training(*PLAIN_RETURNS, *each).experience.make(batch(), version=0) for each in given)
        assert (changed.data.batch[column] - plain.data.batch[column]).abs().max() > 1e-3, more
