"""The learning rate over a run."""

from __future__ import annotations

import pytest

from headwater.learner.optimizer import LearningRate


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
