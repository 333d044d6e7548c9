"""Optimiser steps that the device takes, or skips, before the host knows whether the gradient is finite."""

from __future__ import annotations

import pytest
import torch
from learner.test_engine import actor, engine, experience, weights
from torch import nn

from headwater.config.schema import LearnerConfig
from headwater.learner.engine import TrainEngine
from headwater.learner.optimizer import Optimizer
from headwater.learner.step_sums import StepSums


def optimizer(*, can_queue: bool) -> tuple[Optimizer, nn.Parameter]:
    """AdamW with torch's fused kernel, as on a GPU."""
    parameter = nn.Parameter(torch.linspace(-1.0, 1.0, 12))
    made = Optimizer([parameter], LearnerConfig(learning_rate=0.1, weight_decay=0.1, max_bad_steps=9), 0)
    for group in made.optimizers[0].param_groups:
        group["fused"] = True
    made._can_queue = can_queue
    return made, parameter


def results(steps: list[tuple[float, float]], *, can_queue: bool) -> list[object]:
    """Weights, averages and statistics after steps with these losses and factors of the gradient."""
    made, parameter = optimizer(can_queue=can_queue)
    found: list[object] = []
    for number, (loss, factor) in enumerate(steps):
        parameter.grad = torch.arange(12.0) * factor + number
        norm = made.clip()
        made.queue(torch.tensor(loss, dtype=torch.float64), norm)
        stats = made.step(loss, float(norm))
        assert parameter.grad is None
        found += [parameter.detach().clone(), stats, made.num_steps]
        found += [each.clone() for each in made.state_of(parameter).values()]
    return found


def test_a_queued_step_has_the_bits_of_one_that_waits():
    finite, nan, inf = (1.0, 0.5), (float("nan"), 0.5), (1.0, float("inf"))
    for steps in ([finite] * 3, [finite, nan, finite, inf, finite]):
        queued, plain = (results(steps, can_queue=each) for each in (True, False))
        assert len(queued) == len(plain)
        for ours, theirs in zip(queued, plain, strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_a_first_step_that_is_skipped_changes_nothing():
    made, parameter = optimizer(can_queue=True)
    before = parameter.detach().clone()
    parameter.grad = torch.full((12,), float("nan"))
    norm = made.clip()
    made.queue(torch.tensor(1.0), norm)
    assert made.step(1.0, float(norm))["skipped_steps"] == 1.0
    assert torch.equal(parameter.detach(), before)
    assert made.num_steps == 0
    assert all(not each.any() for each in made.state_of(parameter).values())
    parameter.grad = torch.ones(12)
    norm = made.clip()
    made.queue(torch.tensor(1.0), norm)
    made.step(1.0, float(norm))
    assert made.num_steps == 1
    assert not torch.equal(parameter.detach(), before)


def test_the_step_is_taken_once():
    made, parameter = optimizer(can_queue=True)
    parameter.grad = torch.ones(12)
    norm = made.clip()
    made.queue(torch.tensor(1.0), norm)
    after = parameter.detach().clone()
    made.step(1.0, float(norm))
    assert torch.equal(parameter.detach(), after)
    assert not hasattr(made.optimizers[0], "found_inf")


def test_an_interrupt_after_a_step_was_queued_leaves_a_whole_step(monkeypatch):
    """The step was taken, so it counts, and the next one has the bits that it would have had."""
    results = []
    for is_interrupted in (False, True):
        learner = engine()
        learner.optimizer._can_queue = True
        for group in learner.optimizer.optimizers[0].param_groups:
            group["fused"] = True
        if is_interrupted:
            _interrupted(learner, monkeypatch)
        else:
            actor(learner).update(experience(1))
        assert learner.optimizer.num_steps == 1
        assert all(each.grad is None for each in learner.module.parameters())
        stats = actor(learner).update(experience(2))
        assert learner.optimizer.num_steps == 2
        results.append((weights(learner), stats))
    (plain, stats), (interrupted, others) = results
    assert torch.equal(plain, interrupted)
    assert stats == others


def test_an_interrupt_before_a_step_leaves_no_gradient(monkeypatch):
    learner = engine()
    before = weights(learner)
    _interrupted(learner, monkeypatch)
    assert learner.optimizer.num_steps == 0
    assert all(each.grad is None for each in learner.module.parameters())
    assert torch.equal(weights(learner), before)


def _interrupted(learner: TrainEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that ends while it reads its statistics."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StepSums, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            actor(learner).update(experience(1))
