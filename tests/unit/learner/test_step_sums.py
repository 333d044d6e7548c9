"""What an optimiser step says of its ratios and weights, however the batch is cut."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from headwater.algorithms.diagnostics import ratio_percentiles, weight_metrics
from headwater.algorithms.policy_losses.decoupled import decoupled
from headwater.algorithms.policy_losses.ppo import ppo
from headwater.config.schema import AlgorithmConfig, LearnerConfig
from headwater.core.data_proto import DataProto
from headwater.learner.actor import Actor
from headwater.learner.engine import TrainEngine
from headwater.learner.packed_module import PolicyModule
from headwater.learner.ranks import Ranks
from headwater.learner.step_sums import StepSums
from headwater.rollout.group import pad_trajectories

RATIOS = ["ratio_p01", "ratio_p10", "ratio_p50", "ratio_p90", "ratio_p99"]


def statistics(*micro_batches: tuple[list[float], list[float]]) -> dict[str, float]:
    """Of micro-batches of one row each, given as weights and ratios."""
    sums = StepSums(torch.device("cpu"))
    for weights, ratios in micro_batches:
        mask = torch.ones(1, len(weights))
        sums.add({}, mask)
        sums.add_weights(torch.tensor([weights]), mask)
        sums.add_ratios(torch.tensor([ratios]).log(), mask)
    return sums.statistics(Ranks())


def test_an_effective_sample_size_by_hand():
    """Weights 1, 3 and 0, 0: (4 / 4)² / (10 / 4) = 0.4 of the four tokens; 0.8 of two halves would not be it."""
    stats = statistics(([1.0, 3.0], [1.0, 1.0]), ([0.0, 0.0], [1.0, 1.0]))
    assert stats["effective_sample_size"] == pytest.approx(0.4)


def test_percentiles_are_of_the_step_and_not_means_of_its_parts():
    """Ninety tokens at ratio 1 and eleven at 2, in two parts: the median is 1, the ninetieth per cent is 2."""
    stats = statistics(([1.0] * 90, [1.0] * 90), ([1.0] * 11, [2.0] * 11))
    assert [stats[name] for name in RATIOS] == pytest.approx([1, 1, 1, 2, 2], rel=0.005)


@pytest.mark.parametrize(("weight", "expected"), [(0.0, 0.0), (1e-9, 1.0), (1.0, 1.0)])
def test_a_step_and_a_batch_agree_on_weights_that_are_all_alike(weight, expected):
    """All of 0 leave nothing of the batch; all alike leave all of it, however small they are."""
    of_step = statistics(([weight] * 2, [1.0] * 2))["effective_sample_size"]
    of_batch = weight_metrics(torch.full((1, 2), weight), torch.ones(1, 2))["effective_sample_size"]
    assert of_step == of_batch == pytest.approx(expected)


def test_a_step_without_weights_or_ratios_shows_none():
    sums = StepSums(torch.device("cpu"))
    sums.add({"value": torch.tensor([[1.0, 3.0]])}, torch.ones(1, 2))
    assert sums.statistics(Ranks()) == {"loss": 0.0, "value": 2.0}


def actor(loss, max_tokens: int, **algorithm) -> Actor:
    config = LearnerConfig(max_tokens_per_microbatch=max_tokens, skip_zero_advantages=False)
    engine = TrainEngine(PolicyModule(tiny.model(), temperature=1.0), config)
    return Actor(engine, loss, AlgorithmConfig(**algorithm), loss_width=8)


def experience(seed: int = 0) -> DataProto:
    """The policy is a little off the proximal one, and that one off the one that sampled."""
    trajectories = [tiny.trajectory(row, uid=f"row{row // 4}") for row in range(12)]
    data = pad_trajectories(trajectories, pad_token_id=0).with_columns(meta_info={"version": 2})
    mask, own = data.batch["response_mask"], actor(ppo, 10_000).engine.compute(data)["logprobs"]
    generator = torch.Generator().manual_seed(seed)
    update, gap = (torch.randn(mask.shape, generator=generator) * size * mask for size in (0.1, 1.0))
    old = own - update
    return data.with_columns(
        tensors={"old_logprobs": old, "rollout_logprobs": old - gap, "advantages": mask.clone(), "update": update}
    )


@pytest.mark.parametrize("max_tokens", [16, 40, 10_000])
def test_a_step_of_decoupled_ppo_shows_them_however_it_is_cut(max_tokens):
    data = experience()
    mask, gap = data.batch["response_mask"], data.batch["old_logprobs"] - data.batch["rollout_logprobs"]
    stats = actor(decoupled, max_tokens, policy_loss="decoupled", old_logprobs="recompute").update(data)
    weights = gap.exp()
    weights = weights.masked_fill(weights > 5.0, 0.0)
    assert 0.1 < stats["effective_sample_size"] < 0.9
    of_batch = weight_metrics(weights, mask)["effective_sample_size"]
    assert stats["effective_sample_size"] == pytest.approx(of_batch, rel=1e-4)
    for name, expected in ratio_percentiles(data.batch["update"], mask).items():
        assert math.log(stats[name]) == pytest.approx(math.log(expected), rel=0.01, abs=2e-5)


def test_every_loss_shows_its_ratios_and_only_one_that_weighs_its_effective_sample_size():
    stats = actor(ppo, 10_000).update(experience())
    assert set(RATIOS) <= stats.keys()
    assert "effective_sample_size" not in stats
