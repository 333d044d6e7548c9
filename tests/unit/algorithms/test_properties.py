"""What must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from algorithms.strategies import (
    advantage_inputs,
    as_loss_inputs,
    batches,
    correction_inputs,
    policy_loss_inputs,
    spoilt,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwater.algorithms.advantages import ADVANTAGES, AdvantageInputs
from headwater.algorithms.aggregate import Aggregation, StepTotals, aggregate
from headwater.algorithms.corrections import CORRECTIONS, CorrectionInputs
from headwater.algorithms.diagnostics import offpolicy_metrics, ratio_percentiles, weight_metrics
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.algorithms.value_loss import value_loss

examples = settings(deadline=None, max_examples=25)

MODES = get_args(Aggregation)
ONE_PER_TOKEN = [name for name in POLICY_LOSSES.names() if name not in ("clip_cov", "kl_cov")]
"""The covariance losses look at the whole micro-batch, by their definition."""


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def gradient(losses, mask, mode, totals, leaf):
    return torch.autograd.grad(aggregate(losses, mask, mode, totals), leaf)[0]


@pytest.mark.parametrize("mode", MODES)
@examples
@given(batches(), st.integers(1, 5), st.integers(1, 3))
def test_neither_micro_batches_nor_ranks_change_the_step(mode, batch, size, num_ranks):
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


@pytest.mark.parametrize("name", ONE_PER_TOKEN)
@examples
@given(batches(), st.integers(1, 5))
def test_micro_batches_do_not_change_a_policy_gradient(name, batch, size):
    loss_fn, columns = POLICY_LOSSES.resolve(name), policy_loss_inputs(batch)
    totals = StepTotals.of(batch.mask)

    def gradient_of(cut):
        logprobs = columns["logprobs"].clone().requires_grad_()
        for rows in torch.arange(len(logprobs)).split(cut):
            part = {key: value[rows] for key, value in columns.items()} | {"logprobs": logprobs[rows]}
            loss = loss_fn(as_loss_inputs(part))
            mode = loss.aggregation or "token-mean"
            aggregate(loss.token_losses, part["mask"], mode, totals).backward()
        return logprobs.grad

    close(gradient_of(size), gradient_of(len(batch.mask)))


def permuted(inputs: AdvantageInputs, order) -> AdvantageInputs:
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return AdvantageInputs(**{name: value[order] for name, value in columns.items()})


@pytest.mark.parametrize("name", ADVANTAGES.names())
@examples
@given(batches(min_group=2))
def test_permuting_samples_permutes_advantages(name, batch):
    estimator, inputs, order = ADVANTAGES.resolve(name), advantage_inputs(batch), batch.order()
    expected, actual = estimator(inputs), estimator(permuted(inputs, order))
    close(actual.advantages, expected.advantages[order])
    close(actual.returns, expected.returns[order])


@pytest.mark.parametrize("name", ADVANTAGES.names())
@examples
@given(batches(min_group=2))
def test_advantages_do_not_depend_on_masked_tokens(name, batch):
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


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@examples
@given(batches())
def test_losses_do_not_depend_on_masked_tokens(name, batch):
    loss_fn, columns = POLICY_LOSSES.resolve(name), policy_loss_inputs(batch)

    def evaluated(columns):
        logprobs = columns["logprobs"].clone().requires_grad_()
        loss = loss_fn(as_loss_inputs({**columns, "logprobs": logprobs}))
        total = aggregate(loss.token_losses, batch.mask, loss.aggregation or "token-mean", StepTotals.of(batch.mask))
        total.backward()
        return total, logprobs.grad, loss

    dirty = {key: value if key == "mask" else spoilt(value, batch.mask) for key, value in columns.items()}
    (expected, expected_grad, clean), (total, grad, loss) = evaluated(columns), evaluated(dirty)
    assert torch.equal(total, expected)
    assert torch.equal(grad, expected_grad)
    assert not grad[batch.mask == 0].any()
    for key, values in clean.diagnostics.items():
        kept = batch.mask != 0
        assert torch.equal(loss.diagnostics[key][kept], values[kept]), key


@pytest.mark.parametrize("name", CORRECTIONS.names())
@examples
@given(batches())
def test_corrections_do_not_depend_on_masked_tokens(name, batch):
    correct, inputs = CORRECTIONS.resolve(name), correction_inputs(batch)
    dirty = CorrectionInputs(
        spoilt(inputs.old_logprobs, batch.mask), spoilt(inputs.rollout_logprobs, batch.mask), batch.mask
    )
    expected, actual = correct(inputs), correct(dirty)
    assert torch.equal(actual.weights, expected.weights)
    assert torch.equal(actual.mask, expected.mask)
    assert not actual.weights[batch.mask == 0].any()
    assert bool((actual.mask <= batch.mask).all())


@pytest.mark.parametrize("name", CORRECTIONS.names())
@examples
@given(batches())
def test_a_correction_does_nothing_on_policy(name, batch):
    logprobs = batch.logprobs()
    corrected = CORRECTIONS.resolve(name)(CorrectionInputs(logprobs, logprobs, batch.mask))
    assert torch.equal(corrected.weights, batch.mask)
    assert torch.equal(corrected.mask, batch.mask)


@examples
@given(batches())
def test_the_value_loss_does_not_depend_on_masked_tokens(batch):
    values, old, returns = batch.normal(), batch.normal(), batch.normal()

    def evaluated(*columns):
        values = columns[0].clone().requires_grad_()
        loss = value_loss(values, *columns[1:], batch.mask).token_losses
        aggregate(loss, batch.mask, "token-mean", StepTotals.of(batch.mask)).backward()
        return values.grad

    dirty = [spoilt(each, batch.mask) for each in (values, old, returns)]
    assert torch.equal(evaluated(*dirty), evaluated(values, old, returns))


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
    for name in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"):
        assert not ADVANTAGES.resolve(name)(inputs).advantages.any(), name
