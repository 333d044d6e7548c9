"""Responses that were cut off continue with the critic's value after their last token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from torch.testing import assert_close
from trainer.experience_parts import move_policy, training, trajectory

from headwater.core.errors import DataError
from headwater.rollout.group import Group, RolloutBatch, pad_trajectories

GAMMA, LAM = 0.9, 0.8
ARGUMENTS = f"algorithm.advantage_args={{gamma: {GAMMA}, lam: {LAM}, whitened: false}}"
CRITIC = ["critic.enabled=true", "critic.bootstrap_unfinished=true", "critic.learning_rate=0.1", ARGUMENTS]


def rollouts() -> RolloutBatch:
    """A response that ended, and two that were cut off: of one turn, and of two turns with a message between them."""
    prompt = tiny.prompt()
    fields = [{}, {"stop_reason": "length"}, {"stop_reason": "length", "loss_mask": (1, 0, 1, 1)}]
    samples = [trajectory("row", at, prompt.tokens, 4 - at % 2, reward=1.0, **each) for at, each in enumerate(fields)]
    return RolloutBatch((Group(prompt, tuple(samples)),))


def value_after(parts, sample) -> float:
    """The value before a further token, which may be any."""
    fields = {"loss_mask": 1, "logprobs": 0.0, "versions": 0, "tokens": 77}
    longer = replace(sample, **{name: (*getattr(sample, name), value) for name, value in fields.items()})
    values = parts.learner.compute(pad_trajectories([longer], pad_token_id=0), ["values"])["values"]
    return float(values[0, len(sample.response_tokens)])


def test_the_returns_of_unfinished_responses_contain_the_value_after_them():
    made = rollouts()
    parts = training("algorithm.advantage=gae", *CRITIC)
    move_policy(parts, made)  # the values of a new critic are 0
    columns = parts.experience.make(made, version=0).data.batch
    plain = parts.learner.compute(pad_trajectories(made.trajectories, pad_token_id=0), ["values"])["values"]
    assert_close(columns["values"], plain, atol=1e-5, rtol=1e-5)
    for row, (sample, last) in enumerate(zip(made.trajectories, (3, 2, 3), strict=True)):
        after = value_after(parts, sample) if sample.stop_reason == "length" else 0.0
        assert float(columns["returns"][row, last]) == pytest.approx(1.0 + GAMMA * after, abs=1e-5)
    assert value_after(parts, made.trajectories[1]) != 0.0


def test_a_turn_that_was_cut_off_continues_too():
    made = rollouts()
    parts = training("algorithm.advantage=gae_turn", *CRITIC)
    move_policy(parts, made)  # the values of a new critic are 0
    columns = parts.experience.make(made, version=0).data.batch
    after = value_after(parts, made.trajectories[2])
    values, advantages = columns["values"][2], columns["advantages"][2]
    last = 1.0 + GAMMA * after - values[2]
    first = GAMMA * values[2] - values[0] + GAMMA * LAM * last
    assert_close(advantages, torch.stack([first, torch.zeros(()), last, last]), atol=1e-5, rtol=1e-5)


def test_only_trained_tokens_count_for_the_length_penalty_if_asked():
    """Of four tokens the third sample trains three; the penalty begins at the third of four."""
    settings = ["reward.overlong_tokens=2", "rollout.max_new_tokens=4", "algorithm.advantage=reinforce_plus_plus"]
    for counts, expected in (("response", [0.0, 0.5, 0.0]), ("trained", [0.0, 0.5, 0.5])):
        parts = training(*settings, f"reward.overlong_counts={counts}")
        made = parts.experience.make(rollouts(), version=0).data.batch
        assert made["rewards"].sum(dim=1).tolist() == expected


def test_rewards_that_overflow_when_they_are_scaled_are_refused():
    parts = training("reward.scale=1e300", "algorithm.advantage=reinforce_plus_plus")
    with pytest.raises(DataError, match=r"the rewards of step 3 are not within ±1e\+15.*reward\.scale"):
        parts.experience.make(rollouts(), version=2)
