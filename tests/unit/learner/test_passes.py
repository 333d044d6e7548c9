"""Statistics over the optimiser steps of an update."""

from __future__ import annotations

import math

import pytest
from learner.test_engine import actor, engine, experience

from headwater.learner.step_sums import mean_stats


def test_a_skipped_step_does_not_hide_those_that_were_taken():
    """The first half of the batch has an advantage that is no number; the second half is a step of its own."""
    data = experience(1)
    data.batch["advantages"][:6] *= math.nan
    stats = actor(engine(num_minibatches=2)).update(data)
    alone = actor(engine()).update(data[6:])
    assert (stats.pop("skipped_steps"), alone.pop("skipped_steps")) == (1, 0)
    assert stats.pop("flops") > alone.pop("flops")  # a skipped step is computed too
    # The engine's log-probs are compared with the learner's at the first step only.
    assert stats == pytest.approx({name: value for name, value in alone.items() if not name.startswith("rollout_gap")})


def test_where_every_step_was_skipped_they_are_shown():
    stats = mean_stats([{"loss": math.nan, "entropy": 2.0, "skipped_steps": 1.0}] * 2)
    assert math.isnan(stats["loss"])
    assert (stats["entropy"], stats["skipped_steps"], stats["optimizer_steps"]) == (2.0, 2.0, 0.0)
