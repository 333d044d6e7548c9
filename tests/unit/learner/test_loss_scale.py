"""float16: the loss scale, and steps with it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from engine.engine_parts import build
from hypothesis import given
from hypothesis import strategies as st
from learner.test_engine import experience, weights
from torch import nn
from transformers import LlamaConfig

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import Config, LearnerConfig, ModelConfig
from headwater.core.errors import ModelError, RunError
from headwater.learner.build import LearnerSpec, build_learner
from headwater.learner.engine import TrainEngine
from headwater.learner.loss_scale import LossScale
from headwater.learner.packed_module import PolicyModule

# A CPU computes float16 slowly, so the model is as small as possible.
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


@given(st.integers(0, 24), st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_the_scale_is_a_power_of_two_within_bounds_and_follows_its_rule(exponent, growth_steps, steps):
    scale = LossScale(2.0**exponent, growth_steps=growth_steps)
    expected, num_good = exponent, 0
    for is_finite in steps:
        assert scale.can_shrink == (expected > 0)
        scale.update(is_finite=is_finite)
        num_good = num_good + 1 if is_finite else 0
        if not is_finite:
            expected = max(0, expected - 1)
        elif num_good == growth_steps:
            expected, num_good = min(24, expected + 1), 0
        assert scale.value == 2.0**expected


@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_a_restored_scale_continues_as_the_saved_one(before, after):
    scale = LossScale(65536.0, growth_steps=3)
    for is_finite in before:
        scale.update(is_finite=is_finite)
    other = LossScale(1.0, growth_steps=3)
    other.restore(json.loads(json.dumps(scale.state())))
    for is_finite in after:
        for each in (scale, other):
            each.update(is_finite=is_finite)
    assert other.state() == scale.state()


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False), min_size=1))
def test_scaling_and_unscaling_changes_no_bit(values):
    parameter, scale = nn.Parameter(torch.zeros(len(values))), LossScale(65536.0, growth_steps=1)
    parameter.grad = torch.tensor(values) * scale.value
    scale.unscale([parameter, nn.Parameter(torch.zeros(1))])
    assert torch.equal(parameter.grad, torch.tensor(values))


def likelihood(outputs, batch):
    return PolicyLoss(-outputs["logprobs"])


def engine(dtype: torch.dtype, **settings) -> TrainEngine:
    model = build(CONFIG)
    config = LearnerConfig(learning_rate=1e-3, loss_scale_growth_steps=2, **settings)
    return TrainEngine(PolicyModule(model, 1.0), config, compute_dtype=dtype)


def test_a_float16_step_is_nearly_the_float32_step():
    exact, narrow = engine(torch.float32), engine(torch.float16)
    expected, stats = (each.train_step(experience(1, rows=4), likelihood) for each in (exact, narrow))
    assert "loss_scale" not in expected
    assert stats["loss_scale"] == 65536
    for key in ("loss", "grad_norm"):
        assert stats[key] == pytest.approx(expected[key], rel=2e-3)
    assert weights(narrow).dtype == torch.float32
    # The first step of AdamW has the size of the learning rate; its sign is that of the gradient.
    assert ((weights(narrow) - weights(exact)).abs() < 1e-4).float().mean() > 0.97


def test_an_overflow_skips_the_step_and_halves_the_scale_and_a_checkpoint_keeps_it(tmp_path):
    train_engine = engine(torch.float16, loss_scale=2.0**15, max_bad_steps=1)
    before = weights(train_engine)

    def steep(outputs, batch):
        return PolicyLoss(-outputs["logprobs"] * 3e6)

    stats = train_engine.train_step(experience(1, rows=4), steep)
    assert (stats["skipped_steps"], stats["loss_scale"]) == (1, 2.0**15)
    assert torch.equal(weights(train_engine), before)
    assert train_engine.optimizer.num_steps == 0
    stats = train_engine.train_step(experience(1, rows=4), likelihood)
    assert (stats["skipped_steps"], stats["loss_scale"]) == (0, 2.0**14)
    train_engine.save(tmp_path)
    again = engine(torch.float16)
    again.load(tmp_path)
    assert again.optimizer.loss_scale.state() == {"value": 2.0**14, "num_good_steps": 1}
    for each in (train_engine, again):
        assert each.train_step(experience(2, rows=4), likelihood)["loss_scale"] == 2.0**14
        assert each.optimizer.loss_scale.value == 2.0**15
    assert torch.equal(weights(again), weights(train_engine))


def test_an_overflow_that_no_smaller_scale_prevents_stops_the_run():
    train_engine = engine(torch.float16, loss_scale=1.0, max_bad_steps=1)

    def infinite(outputs, batch):
        return PolicyLoss(-outputs["logprobs"] * 1e30)

    with pytest.raises(RunError, match=r"not finite in 1 steps.*or use model\.dtype=bfloat16"):
        train_engine.train_step(experience(1, rows=4), infinite)
    assert train_engine.optimizer.loss_scale.value == 1


def test_a_loss_that_is_not_finite_leaves_the_scale_alone():
    train_engine = engine(torch.float16)
    stats = train_engine.train_step(
        experience(1, rows=4), lambda outputs, _: PolicyLoss(outputs["logprobs"] * math.nan)
    )
    assert stats["skipped_steps"] == 1
    assert train_engine.optimizer.loss_scale.value == 65536


def test_float16_without_a_gpu_is_refused_at_the_start():
    with pytest.raises(ModelError, match=r"model\.dtype = float16: there is no GPU.*use auto or float32"):
        build_learner(LearnerSpec(Config(model=ModelConfig(dtype="float16", device="cpu")), "tiny:qwen3", "tiny:qwen3"))
