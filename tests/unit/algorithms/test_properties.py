"""What must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

import torch
from algorithms.strategies import (
    advantage_inputs,
    as_loss_inputs,
    batches,
    correction_inputs,
    policy_loss_inputs,
    spoilt,
)
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs
from headwater.algorithms.corrections import CORRECTIONS, CorrectionInputs
from headwater.algorithms.diagnostics import offpolicy_metrics, ratio_percentiles, weight_metrics
from headwater.algorithms.masked import Aggregation, StepTotals, aggregate
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.config.declared import read_declared
from headwater.config.traits import AdvantageTraits
from headwater.learner.critic import value_loss

examples = settings(deadline=None, max_examples=15)

MODES = get_args(Aggregation)
ONE_PER_TOKEN = [name for name in POLICY_LOSSES.names() if name not in ("clip_cov", "kl_cov")]
"""The covariance losses look at the whole micro-batch, by their definition."""


GROUP_ESTIMATORS = [
    name
    for name in ADVANTAGES.names()
    if (traits := read_declared(AdvantageTraits, name).traits).compares_groups
    and not traits.reads_reward_parts
    and not traits.needs_recomputed_logprobs
]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def gradient(losses, mask, mode, totals, leaf):
    return torch.autograd.grad(aggregate(losses, mask, mode, totals), leaf)[0]


@examples
@given(batches(), st.integers(1, 5), st.integers(1, 3))
def test_neither_micro_batches_nor_ranks_change_the_step(batch, size, num_ranks):
    for mode in MODES:
        note(mode)
        losses, mask = batch.normal().requires_grad_(), batch.mask
        totals = StepTotals.of(mask, width=11.0)
        whole = aggregate(losses, mask, mode, totals)
        expected = gradient(losses, mask, mode, totals, losses)

        ranked = replace(totals, data_parallel_size=num_ranks)
        value, summed = torch.zeros(()), torch.zeros_like(losses)
        for rank in range(num_ranks):
            rows = torch.arange(len(losses))[rank::num_ranks]
            for part in rows.split(size):
                share = aggregate(losses[part], mask[part], mode, ranked)
                value = value + share.detach() / num_ranks
                summed = summed + torch.autograd.grad(share, losses)[0] / num_ranks
        close(value, whole.detach())
        close(summed, expected)


def cut_gradient(loss_fn, columns, cut):
    """Of a step whose samples are trained ``cut`` at a time."""
    logprobs, totals = columns["logprobs"].clone().requires_grad_(), StepTotals.of(columns["mask"])
    for rows in torch.arange(len(logprobs)).split(cut):
        part = {key: value[rows] for key, value in columns.items()} | {"logprobs": logprobs[rows]}
        loss = loss_fn(as_loss_inputs(part))
        aggregate(loss.token_losses, part["mask"], loss.aggregation or "token-mean", totals).backward()
    return logprobs.grad


@examples
@given(batches(), st.integers(1, 5))
def test_micro_batches_do_not_change_a_policy_gradient(batch, size):
    for name in ONE_PER_TOKEN:
        note(name)
        loss_fn, columns = POLICY_LOSSES.resolve(name), policy_loss_inputs(batch)
        close(cut_gradient(loss_fn, columns, size), cut_gradient(loss_fn, columns, len(batch.mask)))


def permuted(inputs: AdvantageInputs, order) -> AdvantageInputs:
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return AdvantageInputs(**{name: None if value is None else value[order] for name, value in columns.items()})


@examples
@given(batches(min_group=2))
def test_permuting_samples_permutes_advantages(batch):
    for name in ADVANTAGES.names():
        note(name)
        estimator, inputs, order = ADVANTAGES.resolve(name), advantage_inputs(batch), batch.order()
        expected, actual = estimator(inputs), estimator(permuted(inputs, order))
        close(actual.advantages, expected.advantages[order])
        close(actual.returns, expected.returns[order])


@examples
@given(batches(min_group=2))
def test_advantages_do_not_depend_on_masked_tokens(batch):
    for name in ADVANTAGES.names():
        note(name)
        estimator, inputs = ADVANTAGES.resolve(name), advantage_inputs(batch)
        # A sample's score is the sum of all its rewards, so those are the one column that must be clean.
        dirty = {
            column: spoilt(getattr(inputs, column), batch.mask)
            for column in ("values", "old_logprobs", "sum_pi_squared", "weights")
        }
        expected, actual = estimator(inputs), estimator(replace(inputs, **dirty))
        assert torch.equal(actual.advantages, expected.advantages)
        assert torch.equal(actual.returns, expected.returns)
        assert not actual.advantages[batch.mask == 0].any()
        assert not actual.returns[batch.mask == 0].any()


def evaluated(loss_fn, columns):
    logprobs, mask = columns["logprobs"].clone().requires_grad_(), columns["mask"]
    loss = loss_fn(as_loss_inputs({**columns, "logprobs": logprobs}))
    total = aggregate(loss.token_losses, mask, loss.aggregation or "token-mean", StepTotals.of(mask))
    total.backward()
    return total, logprobs.grad, loss


@examples
@given(batches())
def test_losses_do_not_depend_on_masked_tokens(batch):
    kept = batch.mask != 0
    for name in POLICY_LOSSES.names():
        note(name)
        loss_fn, columns = POLICY_LOSSES.resolve(name), policy_loss_inputs(batch)
        dirty = {key: value if key == "mask" else spoilt(value, batch.mask) for key, value in columns.items()}
        expected, expected_grad, clean = evaluated(loss_fn, columns)
        total, grad, loss = evaluated(loss_fn, dirty)
        assert torch.equal(total, expected)
        assert torch.equal(grad, expected_grad)
        assert not grad[~kept].any()
        for key, values in clean.diagnostics.items():
            assert torch.equal(loss.diagnostics[key][kept], values[kept]), key


@examples
@given(batches())
def test_corrections_do_not_depend_on_masked_tokens(batch):
    for name in CORRECTIONS.names():
        note(name)
        correct, inputs = CORRECTIONS.resolve(name), correction_inputs(batch)
        dirty = CorrectionInputs(
            spoilt(inputs.old_logprobs, batch.mask), spoilt(inputs.rollout_logprobs, batch.mask), batch.mask
        )
        expected, actual = correct(inputs), correct(dirty)
        assert torch.equal(actual.weights, expected.weights)
        assert torch.equal(actual.mask, expected.mask)
        assert not actual.weights[batch.mask == 0].any()
        assert bool((actual.mask <= batch.mask).all())


@examples
@given(batches())
def test_a_correction_does_nothing_on_policy(batch):
    for name in CORRECTIONS.names():
        note(name)
        logprobs = batch.logprobs()
        corrected = CORRECTIONS.resolve(name)(CorrectionInputs(logprobs, logprobs, batch.mask))
        assert torch.equal(corrected.weights, batch.mask)
        assert torch.equal(corrected.mask, batch.mask)


@examples
@given(batches())
def test_the_value_loss_does_not_depend_on_masked_tokens(batch):
    values, old, returns = batch.normal(), batch.normal(), batch.normal()

    def gradient_of(*columns):
        values = columns[0].clone().requires_grad_()
        loss = value_loss(values, *columns[1:], batch.mask).token_losses
        aggregate(loss, batch.mask, "token-mean", StepTotals.of(batch.mask)).backward()
        return values.grad

    dirty = [spoilt(each, batch.mask) for each in (values, old, returns)]
    assert torch.equal(gradient_of(*dirty), gradient_of(values, old, returns))


@examples
@given(batches())
def test_diagnostics_do_not_depend_on_masked_tokens(batch):
    old, rollout = batch.logprobs(), batch.logprobs()
    dirty_old, dirty_rollout = spoilt(old, batch.mask), spoilt(rollout, batch.mask)
    assert offpolicy_metrics(dirty_old, dirty_rollout, batch.mask) == offpolicy_metrics(old, rollout, batch.mask)
    assert ratio_percentiles(dirty_old, batch.mask) == ratio_percentiles(old, batch.mask)
    assert weight_metrics(dirty_old, batch.mask) == weight_metrics(old, batch.mask)


@examples
@given(batches(min_group=2), st.floats(-5, 5))
def test_group_estimators_ignore_a_constant_reward(batch, constant):
    """Equal scores teach nothing, exactly, whatever the score is."""
    assume(constant != 0)
    rewards = torch.zeros(batch.shape)
    rewards[:, 0] = constant
    inputs = AdvantageInputs(rewards, batch.mask, batch.groups)
    for name in GROUP_ESTIMATORS:
        assert not ADVANTAGES.resolve(name)(inputs).advantages.any(), name
