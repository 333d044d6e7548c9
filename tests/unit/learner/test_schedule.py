"""The learning rate over a run."""

from __future__ import annotations

import pytest
import torch

from headwater.config.schema import Config, CriticConfig, LearnerConfig
from headwater.learner.build import critic_settings
from headwater.learner.optimizer import LearningRate, Optimizer


def rates(schedule, steps, *, num_warmup_steps=0, lowest_fraction=0.0):
    rate = LearningRate(8.0, schedule, num_warmup_steps, num_decay_steps=4, lowest_fraction=lowest_fraction)
    return [rate.at(step) for step in range(steps)]


def test_a_constant_rate_stays():
    assert rates("constant", 10) == [8.0] * 10


def test_linear_falls_by_equal_parts_and_stays_at_the_end():
    assert rates("linear", 7) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0]


def test_cosine_falls_slowly_at_both_ends():
    assert rates("cosine", 6) == pytest.approx([8.0, 4 + 4 * 0.5**0.5, 4.0, 4 - 4 * 0.5**0.5, 0.0, 0.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_lowest_fraction_is_where_the_decay_ends(schedule):
    falling = rates(schedule, 6, lowest_fraction=0.25)
    assert falling[0] == 8.0
    assert falling[2] == pytest.approx(5.0)
    assert falling[4:] == [2.0, 2.0]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_before_any_decay(schedule):
    rising = rates(schedule, 4, num_warmup_steps=3)
    assert rising == [2.0, 4.0, 6.0, 8.0]
    assert rates(schedule, 9, num_warmup_steps=3)[3:] == rates(schedule, 6)


def optimizer_rates(num_steps, **settings):
    optimizer = Optimizer([torch.nn.Parameter(torch.ones(1))], LearnerConfig(learning_rate=8.0, **settings), num_steps)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.learning_rate)
        optimizer.num_steps += 1
    return found


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_share_of_the_steps_is_as_many_steps(schedule):
    share = optimizer_rates(10, schedule=schedule, warmup_fraction=0.39)
    assert share == optimizer_rates(10, schedule=schedule, num_warmup_steps=3)
    assert share[:4] == [2.0, 4.0, 6.0, 8.0]


def test_a_share_of_an_unknown_number_of_steps_is_refused():
    with pytest.raises(ValueError, match=r"num_decay_steps = 0: .*learner.warmup_fraction = 0\.5 .*pass the number"):
        optimizer_rates(0, warmup_fraction=0.5)


def test_epsilon_makes_small_gradients_count_less():
    moved = {}
    for epsilon in (1e-8, 1.0):
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = Optimizer([parameter], LearnerConfig(learning_rate=0.1, adam_epsilon=epsilon), 1)
        parameter.grad = torch.full((1,), 0.5)
        optimizer.step(loss=0.0, norm=0.5)
        moved[epsilon] = 1 - parameter.item()
    # The first step of Adam divides the gradient by its own size, plus epsilon.
    assert moved == pytest.approx({1e-8: 0.1, 1.0: 0.1 * 0.5 / 1.5})


def test_the_critic_has_the_learners_schedule_or_its_own():
    learner = LearnerConfig(num_warmup_steps=5, schedule="cosine", lowest_learning_rate_fraction=0.1, adam_epsilon=1e-6)
    same = critic_settings(Config(learner=learner, critic=CriticConfig(enabled=True)))
    assert (same.num_warmup_steps, same.schedule, same.adam_epsilon) == (5, "cosine", 1e-6)
    own = CriticConfig(
        enabled=True, warmup_fraction=0.2, schedule="linear", lowest_learning_rate_fraction=0.5, adam_epsilon=1e-5
    )
    other = critic_settings(Config(learner=learner, critic=own))
    assert (other.num_warmup_steps, other.warmup_fraction) == (0, 0.2)
    assert (other.schedule, other.lowest_learning_rate_fraction, other.adam_epsilon) == ("linear", 0.5, 1e-5)
    without = critic_settings(Config(learner=learner, critic=CriticConfig(enabled=True, warmup_fraction=0.0)))
    assert (without.num_warmup_steps, without.warmup_fraction) == (0, 0.0)
