"""Algorithms as a run uses them: from the config over the experience to an update."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from torch.testing import assert_close
from trainer.experience_parts import policy_logprobs, training, trajectory, with_logprobs

from headwater.rollout.group import Group, RolloutBatch


def test_a_loss_per_sequence_is_weighed_by_the_geometric_mean_of_its_tokens():
    """Weights 2 and 0.1 are sqrt(0.2) for their sample, not 1.05; the ratio to the old policy is 1."""
    parts = training(
        "algorithm.policy_loss=geo_mean", "algorithm.old_logprobs=recompute", "algorithm.corrections=[truncate]"
    )
    prompt = tiny.prompt()
    samples = [trajectory("row", sample, prompt.tokens, 2, reward=float(sample)) for sample in range(2)]
    rollouts = RolloutBatch((Group(prompt, tuple(samples)),))
    weights = torch.tensor([[2.0, 0.1], [1.0, 1.0]])
    rollouts = with_logprobs(rollouts, policy_logprobs(parts, rollouts) - weights.log())
    data = parts.experience.make(rollouts, version=0).data
    assert_close(data.batch["correction_weights"], weights, atol=1e-4, rtol=0)
    lower, higher = data.batch["advantages"][:, 0].tolist()
    loss = parts.actor.update(data)["loss"]
    assert loss == pytest.approx(-(lower * math.sqrt(0.2) + higher) / 2, rel=1e-3)
