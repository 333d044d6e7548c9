"""The smaller parts, on numbers worked out by hand."""

from __future__ import annotations

import inspect
import math
from itertools import product

import pytest
import torch

from headwater.algorithms.corrections import CorrectionInputs, apply_corrections, combine, configured_corrections
from headwater.algorithms.corrections.icepop import icepop
from headwater.algorithms.corrections.m2po import m2po
from headwater.algorithms.corrections.reject import reject
from headwater.algorithms.corrections.truncate import truncate
from headwater.algorithms.diagnostics import ratio_percentiles, staleness_histogram, weight_metrics
from headwater.algorithms.kl import AdaptiveKL, kl_penalty
from headwater.algorithms.masked import StepTotals, aggregate, masked_sum, masked_var, require, whiten
from headwater.algorithms.normalize import overlong_penalty
from headwater.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from headwater.algorithms.policy_losses.clip_cov import clip_cov
from headwater.algorithms.policy_losses.decoupled import decoupled
from headwater.algorithms.policy_losses.geo_mean import geo_mean
from headwater.algorithms.policy_losses.gspo import gspo
from headwater.algorithms.policy_losses.kl_cov import kl_cov
from headwater.algorithms.policy_losses.ppo import ppo
from headwater.algorithms.proximal import approximation_metrics, progress
from headwater.config.schema import AlgorithmConfig
from headwater.core.errors import ConfigError, MissingColumn, UnknownName
from headwater.learner.packed_module import token_logprobs


def ratios(*values):
    """Correction inputs of one row with these ratios π_train/π_rollout."""
    old = torch.tensor([values]).log()
    return CorrectionInputs(old, torch.zeros_like(old), torch.ones_like(old))


def test_masked_entries_may_be_anything():
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
    assert masked_sum(values, torch.eye(2)).item() == 3.0


def test_one_entry_has_no_spread():
    values, mask = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 0.0])
    assert masked_var(values, mask).item() == 0.0
    assert whiten(values, mask).tolist() == [0.0, 0.0]


def test_whitened_equal_values_are_exactly_zero():
    for value, count in product((0.1, 0.7, 0.9, -2.3), (3, 7, 100, 1000)):
        values, mask = torch.full((2, count), value), torch.tensor([[1.0], [0.0]]).expand(2, count)
        assert not whiten(values, mask).any(), (value, count)
        assert not whiten(values, torch.zeros_like(mask)).any(), (value, count)


def test_an_unknown_aggregation_is_named():
    ones = torch.ones(1, 1)
    with pytest.raises(UnknownName, match="did you mean 'token-mean'"):
        aggregate(ones, ones, "token_mean", StepTotals.of(ones))


def test_an_unknown_kl_estimator_is_named():
    with pytest.raises(UnknownName, match="k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


def test_the_limit_of_log_ratios_is_an_argument():
    """A limit of 1 turns a log ratio of 2 into 1; without one it stays 2."""
    far = torch.full((1, 1), 2.0)
    inputs = PolicyLossInputs(far, torch.zeros(1, 1), torch.full((1, 1), -1.0), torch.ones(1, 1))
    ratio = ratios(far.exp().item())
    for limit, expected in ((1.0, 1.0), (None, 2.0)):
        assert kl_cov(inputs, coefficient=0.0, max_log_ratio=limit).token_losses.log().item() == pytest.approx(expected)
        assert ppo(inputs, dual_clip=torch.inf, max_log_ratio=limit).token_losses.log().item() == pytest.approx(
            expected
        )
        assert geo_mean(
            inputs, clip_low=9.0, clip_high=9.0, max_log_ratio=limit
        ).token_losses.log().item() == pytest.approx(expected)
        for weights in (
            truncate(ratio, upper=torch.inf, max_log_ratio=limit).weights,
            icepop(ratio, upper=torch.inf, max_log_ratio=limit).weights,
            reject(ratio, upper=torch.inf, weighted=True, max_log_ratio=limit).weights,
        ):
            assert weights.log().item() == pytest.approx(expected)


def test_the_limit_of_the_divergence_is_a_setting():
    """With d = -5, k3 is e⁵ - 6 = 142.4 and k2 is 12.5."""
    logprobs, reference = torch.full((1,), -5.0), torch.zeros(1)
    expected = {"k3": (10.0, 12.5), "all": (10.0, 10.0), "none": (math.exp(5) - 6, 12.5)}
    for clamp, (k3, k2) in expected.items():
        assert kl_penalty(logprobs, reference, "k3", clamp).item() == pytest.approx(k3)
        assert kl_penalty(logprobs, reference, "k3+", clamp).item() == pytest.approx(k3)
        assert kl_penalty(logprobs, reference, "k2", clamp).item() == pytest.approx(k2)


def test_with_a_limit_one_extreme_token_neither_overflows_nor_dominates_the_gradient():
    """``far`` is its log ratio."""
    for name, advantage, far in product(POLICY_LOSSES.names(), (-1.0, 1.0), (35.0, 110.0, -110.0)):
        takes_limit = "max_log_ratio" in inspect.signature(POLICY_LOSSES.resolve(name)).parameters
        logprobs = torch.tensor([[min(far, 0.0), -0.1, -0.2]], requires_grad=True)
        old = torch.tensor([[min(-far, 0.0), 0.0, 0.0]])
        advantages = torch.tensor([[advantage, 0.5, -0.5]])
        inputs = PolicyLossInputs(logprobs, old, advantages, torch.ones(1, 3), rollout_logprobs=old)
        losses = POLICY_LOSSES.resolve(name)(inputs, **({"max_log_ratio": 20.0} if takes_limit else {}))
        losses.token_losses.sum().backward()
        assert losses.token_losses.isfinite().all(), (name, advantage, far)
        assert logprobs.grad.isfinite().all(), (name, advantage, far)
        assert logprobs.grad.abs().max() < 2 * math.exp(20), (name, advantage, far)


def test_kl_cov_pulls_a_held_token_back_however_far_it_is():
    logprobs = torch.tensor([[50.0, -0.1, -0.2]], requires_grad=True)
    advantages, zeros = torch.tensor([[1.0, 0.0, 0.0]]), torch.zeros(1, 3)
    inputs = PolicyLossInputs(logprobs, zeros, advantages, torch.ones(1, 3))
    kl_cov(inputs, max_log_ratio=20.0).token_losses.sum().backward()
    assert logprobs.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_a_divergence_that_is_not_finite_does_not_steer():
    for kl in (math.nan, math.inf, -math.inf):
        steered = AdaptiveKL(0.1, target=6.0, horizon=1000)
        steered.update(kl, num_samples=8)
        assert steered.coefficient == 0.1, kl


def test_a_steered_coefficient_never_rewards_divergence():
    """256 samples over a horizon of 50 would take 0.1 to -0.0024."""
    steered = AdaptiveKL(0.1, target=6.0, horizon=50)
    steered.update(0.0, num_samples=256)
    assert steered.coefficient == 0.0


def test_bounds_are_on_train_over_rollout_and_inclusive():
    given = ratios(0.25, 0.5, 1.0, 2.0, 4.0)
    assert truncate(given, upper=2.0).weights.tolist() == [[0.25, 0.5, 1.0, 2.0, 2.0]]
    assert icepop(given, lower=0.5, upper=2.0).weights.tolist() == [[0.0, 0.5, 1.0, 2.0, 0.0]]
    assert reject(given, lower=0.5, upper=2.0).mask.tolist() == [[0.0, 1.0, 1.0, 1.0, 0.0]]


def test_one_bad_token_rejects_its_sequence_by_the_maximum_only():
    given = ratios(0.5, 0.5, 4.0)
    assert not reject(given, level="sequence", reduction="max", upper=3.0).mask.any()
    assert reject(given, level="sequence", reduction="mean", upper=3.0).mask.all()


def test_combined_corrections_multiply():
    given = ratios(0.25, 1.0, 4.0)
    both = combine({"truncate": truncate(given, upper=2.0), "reject": reject(given, lower=0.5, upper=8.0)})
    assert both.weights.tolist() == [[0.0, 1.0, 2.0]]
    assert both.mask.tolist() == [[0.0, 1.0, 1.0]]
    assert set(both.diagnostics) == {"truncate/truncated_fraction", "reject/rejected_fraction", "reject/measured"}


@pytest.mark.parametrize(("loss", "weighted"), [(geo_mean, [-math.sqrt(2 * 0.1)] * 2), (gspo, [-2.0, -0.1])])
def test_one_loss_of_a_row_takes_the_geometric_mean_of_its_weights(loss, weighted):
    """GSPO's ratio is a row's too, but each token has a loss of its own, and so its own weight."""
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    found = loss(PolicyLossInputs(zeros, zeros, ones, mask)).weighted(torch.tensor([[2.0, 0.1, 0.0]]), mask)
    assert found.token_losses[0, :2].tolist() == pytest.approx(weighted)


def test_values_of_the_same_name_do_not_hide_each_other():
    given = ratios(0.25, 1.0, 4.0, 1.0)
    both = combine({"reject": reject(given, lower=0.5), "m2po": m2po(given)})
    rejected = {name: float(values.sum()) for name, values in both.diagnostics.items() if "rejected" in name}
    assert rejected == {"reject/rejected_fraction": 2.0, "m2po/rejected_fraction": 2.0}


def loss_inputs(**columns):
    shape = (2, 3)
    plain = {name: torch.zeros(shape) for name in ("logprobs", "old_logprobs", "advantages")}
    return PolicyLossInputs(**{**plain, "mask": torch.ones(shape), **columns})


def test_the_decoupled_loss_needs_the_rollout_only_for_its_weight():
    assert not decoupled(loss_inputs(), weight="none").token_losses.any()
    with pytest.raises(MissingColumn, match="rollout_logprobs"):
        decoupled(loss_inputs())


def test_the_decoupled_weight_multiplies_the_clipped_loss():
    # r = 2 is clipped to 1.2, w = exp(proximal - behaviour) = 0.5: the loss is -1.2·0.5, not min(r·w, ...).
    two = torch.full((2, 3), math.log(2.0))
    inputs = loss_inputs(logprobs=two, advantages=torch.ones(2, 3), rollout_logprobs=two)
    assert decoupled(inputs).token_losses.tolist() == [[pytest.approx(-0.6)] * 3] * 2


def test_removed_tokens_do_not_make_the_others_count_more():
    behaviour = torch.tensor([[0.0, 0.0, -10.0], [0.0, 0.0, 0.0]])
    inputs = loss_inputs(advantages=torch.ones(2, 3), rollout_logprobs=behaviour)
    loss = decoupled(inputs, upper=5.0)
    assert loss.diagnostics["rejected_fraction"].sum() == 1
    assert aggregate(loss.token_losses, inputs.mask, "token-mean", StepTotals.of(inputs.mask)) == pytest.approx(-5 / 6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejected_tokens_are_not_clipped_ones_and_show_their_ratio(level):
    """The policy doubled every probability. The first row is rejected; of the second none is clipped."""
    doubled = torch.full((2, 3), math.log(2.0))
    behaviour = torch.tensor([[-10.0] * 3, [0.0] * 3])
    inputs = loss_inputs(logprobs=doubled, advantages=torch.full((2, 3), -1.0), rollout_logprobs=behaviour)
    shown = decoupled(inputs, ratio_level=level, clip_low=0.6, dual_clip=1.5, upper=5.0).diagnostics
    assert shown["rejected_fraction"].tolist() == [[1.0] * 3, [0.0] * 3]
    assert not shown["clip_fraction"].any()
    assert shown["dual_clip_fraction"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert shown["ratio"].tolist() == [[pytest.approx(2.0)] * 3] * 2
    assert shown["approx_kl"].tolist() == [[pytest.approx(-math.log(2.0))] * 3] * 2


def test_clamping_by_another_metric_is_refused():
    with pytest.raises(ConfigError, match="clamps the weight itself"):
        decoupled(loss_inputs(rollout_logprobs=torch.zeros(2, 3)), weight="clamp", metric="k3")


def test_geo_mean_averages_over_rows_without_trained_tokens_too():
    """verl takes the plain mean of all rows: two rows of loss -1 and one without tokens give -2/3."""
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    loss = geo_mean(PolicyLossInputs(torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(3, 2), mask))
    total = aggregate(loss.token_losses, mask, loss.aggregation, StepTotals.of(mask))
    assert total.item() == pytest.approx(-2 / 3)
    shares = [aggregate(loss.token_losses[at], mask[at], loss.aggregation, StepTotals.of(mask)) for at in ([0, 2], [1])]
    assert sum(shares).item() == pytest.approx(-2 / 3)


def test_a_repeated_rule_has_its_own_arguments_and_metrics():
    """Ratios 4, 1 and 0.2: one rule bounds each token from above, the other the geometric mean of the row."""
    algorithm = AlgorithmConfig(
        corrections=("reject", "reject"),
        corrections_args={"reject": [{"upper": 2.0}, {"level": "sequence", "lower": 0.5, "upper": 0.9}]},
    )
    rows = torch.tensor([[4.0, 1.0, 0.2], [1.0, 1.0, 1.0]]).log()
    given = CorrectionInputs(rows, torch.zeros(2, 3), torch.ones(2, 3))
    combined, metrics = apply_corrections(configured_corrections(algorithm), given)
    assert combined.mask.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert metrics["reject_1/rejected_fraction"] == pytest.approx(1 / 6)
    assert metrics["reject_1/rejected_sequence_fraction"] == 0.5
    assert metrics["reject_1/measured_max"] == pytest.approx(4.0)
    assert metrics["reject_2/rejected_fraction"] == 1.0
    assert metrics["reject_2/measured_min"] == pytest.approx(0.8 ** (1 / 3))
    assert metrics["rejected_fraction"] == metrics["rejected_sequence_fraction"] == 1.0


def test_clip_cov_takes_out_as_many_tokens_as_it_was_told():
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.randn(8, 8, generator=generator) for name in ("logprobs", "advantages")}
    inputs = PolicyLossInputs(**columns, old_logprobs=columns["logprobs"], mask=torch.ones(8, 8))
    first = clip_cov(inputs, fraction=0.1, lower=0.0, upper=100.0)
    assert first.diagnostics["clip_fraction"].sum() == 6
    again = clip_cov(inputs, fraction=0.1, lower=0.0, upper=100.0)
    assert torch.equal(again.token_losses, first.token_losses)
    other = clip_cov(inputs, fraction=0.1, lower=0.0, upper=100.0, seed=1)
    assert not torch.equal(other.token_losses, first.token_losses)


def test_the_proximal_policy_is_one_version_behind():
    versions = torch.tensor([-1, 0, 2, 3, 4, 5])
    assert progress(versions, 4).tolist() == [0.0, 0.75, 0.5, 0.0, 0.0, 0.0]


def test_approximation_metrics_are_zero_where_it_is_exact():
    logprobs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    metrics = approximation_metrics(logprobs, logprobs, torch.zeros(2, 3), 4, torch.ones(2, 3))
    for name, tolerance in (("proximal", 0.0), ("proximal_linear", 1e-5)):
        assert metrics[f"{name}_error_abs"] <= tolerance
        assert metrics[f"{name}_ratio_mean"] == pytest.approx(1.0)


def test_what_normalising_changes_is_reported():
    """Ratios 4, 1 and 1, bounded by 2: the mean weight is 4/3."""
    algorithm = AlgorithmConfig(corrections=("truncate",), corrections_args={"truncate": {"normalize": True}})
    given = CorrectionInputs(torch.tensor([[4.0, 1.0, 1.0]]).log(), torch.zeros(1, 3), torch.ones(1, 3))
    combined, metrics = apply_corrections(configured_corrections(algorithm), given)
    assert combined.weights[0].tolist() == pytest.approx([1.5, 0.75, 0.75])
    assert metrics["truncate/normalizer"] == pytest.approx(4 / 3)
    assert (metrics["truncate/weight_max"], metrics["weight_max"]) == pytest.approx((2.0, 1.5))


def test_the_overlong_penalty_begins_in_the_buffer():
    penalty = overlong_penalty(torch.tensor([50, 80, 90, 100]), max_tokens=100, buffer_tokens=20, factor=2.0)
    assert penalty.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_the_entropy_of_a_forced_token_is_zero():
    logits = torch.tensor([[0.0, -1e9, -1e9]], requires_grad=True)
    entropy = token_logprobs(logits, torch.eye(3), None, torch.tensor([0]), 1.0).entropy
    entropy.sum().backward()
    assert entropy.item() == 0.0
    assert torch.isfinite(logits.grad).all()


def test_staleness_counts_trained_tokens_only():
    versions, mask = torch.tensor([[3, 2, -1, 2]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert staleness_histogram(versions, mask, 4) == {1: 1, 2: 1}


def test_weights_are_told_by_token_and_by_sequence():
    """Weights 1, 3 and 2, of rows with means 2 and 2; what is masked counts nowhere, a whole row neither."""
    weights = torch.tensor([[1.0, 3.0], [2.0, 9.0], [5.0, 5.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert weight_metrics(weights, mask) == pytest.approx(
        {
            "effective_sample_size": 6 / 7, "weight_mean": 2.0, "weight_std": math.sqrt(2 / 3), "weight_max": 3.0,
            "weight_min": 1.0, "sequence_weight_mean": 2.0, "sequence_weight_std": 0.0, "sequence_weight_max": 2.0,
            "sequence_weight_min": 2.0, "sequence_weight_max_deviation": 1.0,
        }
    )  # fmt: skip
    assert weight_metrics(weights, torch.zeros_like(mask)) == {}


def test_percentiles_of_an_even_spread():
    log_ratio = torch.arange(1, 102).float().log()[None]
    percentiles = ratio_percentiles(log_ratio, torch.ones_like(log_ratio))
    assert {name: round(value) for name, value in percentiles.items()} == {
        "ratio_p01": 2, "ratio_p10": 11, "ratio_p50": 51, "ratio_p90": 91, "ratio_p99": 100,
    }  # fmt: skip
    assert ratio_percentiles(log_ratio, torch.zeros_like(log_ratio)) == {}


def test_a_column_that_is_there_is_handed_on():
    column = torch.ones(1)
    assert require(column, "values", "someone", "do something") is column
