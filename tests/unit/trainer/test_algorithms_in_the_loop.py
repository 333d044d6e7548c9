"""Algorithms as a run uses them: from the config over the experience to an update."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tiny
import torch
from algorithms.doc_sections import ALGORITHMS, metrics, turn_on
from torch.testing import assert_close
from trainer.experience_parts import batch, policy_logprobs, training, trajectory, with_logprobs

from headwater.learner.engine import TrainEngine
from headwater.learner.export import merged_weights
from headwater.learner.step_sums import GAP
from headwater.rollout.group import Group, RolloutBatch

OF_EVERY_UPDATE = {
    "loss", "entropy", "flops", "learning_rate", "grad_norm", "skipped_steps", "optimizer_steps",
    "ratio_p01", "ratio_p10", "ratio_p50", "ratio_p90", "ratio_p99",
}  # fmt: skip
OF_EVERY_CORRECTION = {
    "correction/kept_fraction",
    "correction/effective_sample_size",
    "correction/weight_max",
    "correction/sequence_weight_max",
    "rollout_gap/ratio_p01",
    "rollout_gap/ratio_p99",
}


@pytest.fixture(autouse=True)
def one_thread():
    """A model this small is faster without a second one, above all where other tests run beside this."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rollouts_near(parts) -> RolloutBatch:
    """With all that any algorithm asks for: greedy scores, rewards in parts, and an engine that is a little off."""
    made = batch(baselines=(0.25, 0.75))
    groups = [
        replace(group, trajectories=tuple(replace(each, info=in_parts(each.reward)) for each in group.trajectories))
        for group in made.groups
    ]
    made = replace(made, groups=tuple(groups))
    own = policy_logprobs(parts, made)
    return with_logprobs(made, own + 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0)))


def in_parts(reward: float) -> dict[str, list[float]]:
    return {"reward_parts": [reward / 4, 3 * reward / 4]}


def weights(engine: TrainEngine) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in merged_weights(engine.module.model)]).clone()


def assert_learns(learner, data) -> dict[str, float]:
    """One update; returns its statistics."""
    before = weights(learner.engine)
    stats = learner.update(data)
    assert stats["optimizer_steps"] == 1
    assert stats["skipped_steps"] == 0
    assert all(math.isfinite(value) for value in stats.values()), stats
    assert stats["grad_norm"] > 0
    after = weights(learner.engine)
    assert after.isfinite().all()
    assert not torch.equal(after, before)
    return stats


@pytest.mark.parametrize(("chapter", "name"), ALGORITHMS)
def test_every_algorithm_trains_as_the_docs_turn_it_on(chapter, name):
    parts = training(*turn_on(chapter, name))
    made = parts.experience.make(rollouts_near(parts), version=0)
    columns = made.data.batch
    assert columns["advantages"].isfinite().all()
    assert columns["advantages"].any()
    stats = assert_learns(parts.learner.actor, made.data)
    if parts.learner.critic is not None:
        assert_learns(parts.learner.critic, made.data)
    assert all(math.isfinite(value) for value in made.metrics.values()), made.metrics
    if chapter == "Policy losses":
        assert {key for key in stats if not key.startswith(GAP)} - OF_EVERY_UPDATE == metrics(chapter, name)
    if chapter == "Corrections":
        assert made.metrics.keys() >= OF_EVERY_CORRECTION
        own = {key for key in made.metrics if key.startswith(f"correction/{name}/")}
        assert own == {f"correction/{name}/{metric}" for metric in metrics(chapter, name)}


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
    loss = parts.learner.actor.update(data)["loss"]
    assert loss == pytest.approx(-(lower * math.sqrt(0.2) + higher) / 2, rel=1e-3)
