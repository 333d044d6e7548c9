"""From rollouts to what the learner trains on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from trainer.experience_parts import batch, move_policy, policy_logprobs, scores, training, trajectory, with_logprobs

from headwater.core.errors import DataError, MissingColumn, RunError
from headwater.learner.export import merged_weights
from headwater.rollout.group import Group, RolloutBatch, pad_trajectories


def test_a_plain_run_takes_what_the_engine_recorded():
    rollouts = batch()
    made = training().experience.make(rollouts, version=2)
    columns = made.data.batch
    assert_close(columns["old_logprobs"], columns["rollout_logprobs"])
    assert_close(columns["rewards"].sum(dim=1), scores(rollouts))
    assert {"values", "reference_logprobs", "correction_weights", "sum_pi_squared"}.isdisjoint(columns.keys())
    assert made.metrics["staleness/lag_2"] == 1.0
    kinds = {name.partition("/")[0] for name in made.metrics}
    assert kinds == {"staleness", "advantage", "return", "shaped_reward"}
    advantages, mask = columns["advantages"], columns["response_mask"] != 0
    assert made.metrics["advantage/max"] == pytest.approx(float(advantages[mask].max()))
    assert made.metrics["shaped_reward/mean"] == pytest.approx(float(scores(rollouts).mean()))


def test_the_share_of_tokens_is_told_by_how_far_they_lag():
    """Versions 3, 3, 5 and 4, 5, 5, 5 at version 5; what is masked, or not of the policy, is not counted."""
    prompt = tiny.prompt()

    def sample(number, loss_mask, versions):
        made = trajectory("row", number, prompt.tokens, len(versions), loss_mask=loss_mask)
        return replace(made, versions=(-1,) * len(prompt.tokens) + versions)

    samples = (sample(0, (1, 1, 0, 1), (3, 3, -1, 5)), sample(1, (1, 0, 1, 1, 1), (4, 1, 5, 5, 5)))
    made = training().experience.make(RolloutBatch((Group(prompt, samples),)), version=5)
    lags = {name: share for name, share in made.metrics.items() if name.startswith("staleness/")}
    assert lags == {"staleness/lag_0": 4 / 7, "staleness/lag_1": 1 / 7, "staleness/lag_2": 2 / 7}


def test_a_group_that_agrees_has_no_advantage():
    advantages = training().experience.make(batch(reward=0.9), version=0).data.batch["advantages"]
    assert not advantages.any()


def test_the_reference_is_the_policy_as_it_started():
    parts, rollouts = training("algorithm.kl_in_reward=0.1"), batch()
    at_start = policy_logprobs(parts, rollouts)
    move_policy(parts, rollouts)
    columns = parts.experience.make(rollouts, version=1).data.batch
    assert torch.equal(columns["reference_logprobs"], at_start)
    assert (policy_logprobs(parts, rollouts) - at_start).abs().max() > 0.01


def test_after_a_supervised_start_the_reference_begins_anew(tmp_path):
    parts, rollouts = training("algorithm.kl_in_reward=0.1"), batch()
    for _ in range(2):  # the second time as after a start that was broken off
        move_policy(parts, rollouts)
        parts.learner.keep_reference(tmp_path / "reference")
    columns = parts.experience.make(rollouts, version=0).data.batch
    assert torch.equal(columns["reference_logprobs"], policy_logprobs(parts, rollouts))
    kept = load_file(tmp_path / "reference" / "model.safetensors")
    assert all(
        torch.equal(kept[name], weight)
        for name, weight in merged_weights(parts.learner.actor.engine.module.model)
        if name in kept
    )


@pytest.mark.parametrize(("kind", "estimate"), [("k1", lambda d: d), ("k2", lambda d: d.square() / 2)])
def test_a_divergence_is_taken_off_every_tokens_reward(kind, estimate):
    parts = training("algorithm.kl_in_reward=0.1", f"algorithm.kl_estimator={kind}", "algorithm.old_logprobs=recompute")
    rollouts = batch()
    move_policy(parts, rollouts)
    made = parts.experience.make(rollouts, version=1)
    columns = made.data.batch
    kl = estimate(columns["old_logprobs"] - columns["reference_logprobs"])
    assert kl.abs().max() > 1e-3
    plain = pad_trajectories(rollouts.trajectories, 0).batch["rewards"]
    assert_close(columns["rewards"], plain - 0.1 * kl)
    per_sample = kl.sum(dim=1) / columns["response_mask"].sum(dim=1)
    assert made.metrics["kl/reference"] == pytest.approx(float(per_sample.mean()), rel=1e-4)


def test_a_divergence_in_the_loss_leaves_rewards_alone_and_raises_the_loss():
    settings = ["learner.skip_zero_advantages=false", "algorithm.old_logprobs=recompute"]
    rollouts = batch()
    losses = []
    for extra in ([], ["algorithm.kl_in_loss=0.5"]):
        parts = training(*settings, *extra)
        move_policy(parts, rollouts)
        made = parts.experience.make(rollouts, version=1).data
        assert_close(made.batch["rewards"].sum(dim=1), scores(rollouts))
        losses.append(parts.learner.actor.update(made))
    plain, penalized = losses
    assert penalized["reference_kl"] > 1e-3
    assert penalized["loss"] == pytest.approx(plain["loss"] + 0.5 * penalized["reference_kl"], rel=0.05)


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 1.2), (1e9, 0.8)])
def test_the_coefficient_is_steered_towards_its_target(target, factor):
    steering = [f"algorithm.kl_target={target}", "algorithm.kl_horizon=8", "algorithm.old_logprobs=recompute"]
    eight_samples = ["trainer.num_prompts_per_step=2", "rollout.num_samples_per_prompt=4"]
    parts, rollouts = training("algorithm.kl_in_reward=0.1", *steering, *eight_samples), batch()
    move_policy(parts, rollouts)
    before = parts.experience.kl.coefficient
    made = parts.experience.make(rollouts, version=1)
    assert made.metrics["kl/coefficient"] == before
    assert parts.experience.kl.coefficient == pytest.approx(factor * before)


def test_a_coefficient_without_a_target_stays():
    parts = training("algorithm.kl_in_reward=0.1")
    for version in range(3):
        parts.experience.make(batch(), version)
    assert parts.experience.kl.coefficient == 0.1


def test_the_penalty_for_length_stands_where_the_reward_does():
    """Four tokens are the limit and the penalty grows over the last two; the last token of the fourth is a tool's."""
    prompt = tiny.prompt()
    lengths = {0: (1, 1), 1: (1, 1, 1), 2: (1, 1, 1, 1), 3: (1, 1, 1, 0)}
    samples = [
        trajectory("row", sample, prompt.tokens, len(mask), loss_mask=mask, reward=1.0)
        for sample, mask in lengths.items()
    ]
    parts = training("reward.overlong_tokens=2", "reward.overlong_penalty=0.6")
    made = parts.experience.make(RolloutBatch((Group(prompt, tuple(samples)),)), version=0)
    expected = torch.tensor([[0, 1.0, 0, 0], [0, 0, 0.7, 0], [0, 0, 0, 0.4], [0, 0, 0.4, 0]])
    assert_close(made.data.batch["rewards"], expected)
    assert made.metrics["reward/overlong_penalty"] == pytest.approx(-(0 + 0.3 + 0.6 + 0.6) / 4)


def test_recomputed_logprobs_replace_the_recorded_ones_and_the_gap_is_reported():
    parts, rollouts = training("algorithm.old_logprobs=recompute"), batch()
    own = policy_logprobs(parts, rollouts)
    made = parts.experience.make(with_logprobs(rollouts, own - 0.25), version=0)
    assert_close(made.data.batch["old_logprobs"], own)
    assert made.metrics["rollout_logprob_gap"] == pytest.approx(0.25, rel=1e-4)
    assert made.metrics["rollout_gap/kl"] == pytest.approx(-0.25, rel=1e-4)


def test_log_probs_that_nothing_else_reads_are_left_to_the_update(monkeypatch):
    parts, rollouts = training("algorithm.old_logprobs=recompute", "trainer.save_learner_logprobs=false"), batch()
    rollouts = with_logprobs(rollouts, policy_logprobs(parts, rollouts) - 0.25)
    monkeypatch.setattr(parts.learner, "compute", None)
    made = parts.experience.make(rollouts, version=0)
    assert {"old_logprobs", "sum_pi_squared"}.isdisjoint(made.data.batch.keys())
    assert made.data.meta_info["measures_itself"]
    assert made.saved.keys() == {"advantages", "returns"}
    stats = parts.learner.update(made.data)
    assert stats["rollout_gap/logprob_abs_mean"] == pytest.approx(0.25, abs=1e-5)
    assert stats["actor/ratio_p01"] == stats["actor/ratio_p99"] == 1.0


def test_metrics_reports_how_far_off_the_guess_between_the_policies_is():
    """Sampled two versions ago, the proximal policy is half way: half of the gap of 1 is the error."""
    parts, rollouts = training("algorithm.old_logprobs=metrics"), batch()
    own = policy_logprobs(parts, rollouts)
    made = parts.experience.make(with_logprobs(rollouts, own - 1.0), version=2)
    assert_close(made.data.batch["old_logprobs"], own)
    assert made.metrics["proximal_error_mean"] == pytest.approx(-0.5, rel=1e-4)
    assert made.metrics["proximal_ratio_mean"] == pytest.approx(math.exp(-0.5), rel=1e-4)
    halfway = math.log((1 + math.exp(-1)) / 2)
    assert made.metrics["proximal_linear_error_mean"] == pytest.approx(halfway, rel=1e-2)


def off_by(parts, rollouts, log_ratio: float, row: int, column: int):
    """Rollouts on policy but for one token, where the ratio of learner to engine is ``exp(log_ratio)``."""
    recorded = policy_logprobs(parts, rollouts)
    recorded[row, column] -= log_ratio
    return with_logprobs(rollouts, recorded)


def test_a_rejected_token_leaves_the_mask_and_nothing_else_changes():
    parts = training("algorithm.old_logprobs=recompute", "algorithm.corrections=[reject]")
    rollouts = off_by(parts, batch(), 1.0, row=3, column=1)
    made = parts.experience.make(rollouts, version=0)
    whole = pad_trajectories(rollouts.trajectories, 0).batch["response_mask"]
    expected = whole.clone()
    expected[3, 1] = 0
    assert_close(made.data.batch["response_mask"], expected)
    assert_close(made.data.batch["correction_weights"], expected)
    assert made.metrics["correction/kept_fraction"] == pytest.approx(1 - 1 / float(whole.sum()))
    assert made.metrics["correction/reject/rejected_fraction"] == pytest.approx(1 / float(whole.sum()))
    # A token of weight 0 among weights of 1 takes its own share and nothing more.
    assert made.metrics["correction/effective_sample_size"] == pytest.approx(1 - 1 / float(whole.sum()))
    assert made.metrics["rollout_gap/ratio_p50"] == pytest.approx(1.0)
    assert made.metrics["rollout_gap/ratio_p99"] == pytest.approx(math.e, rel=1e-4)


def test_corrections_that_leave_nothing_say_so():
    parts = training(
        "algorithm.old_logprobs=recompute",
        "algorithm.corrections=[reject]",
        "algorithm.corrections_args={reject: {upper: 1.0e-6}}",
    )
    with pytest.raises(RunError, match=r"algorithm\.corrections = \['reject'\]: left no token of step 3 to train on"):
        parts.experience.make(batch(), version=2)


def test_weights_are_the_capped_ratios_and_leave_the_mask_alone():
    parts = training("algorithm.old_logprobs=recompute", "algorithm.corrections=[truncate]")
    made = parts.experience.make(off_by(parts, batch(), 5.0, row=3, column=1), version=0).data.batch
    assert made["correction_weights"][3, 1] == 2.0
    assert_close(made["correction_weights"][3, 2], torch.tensor(1.0), atol=1e-4, rtol=0)
    assert_close(made["response_mask"], pad_trajectories(batch().trajectories, 0).batch["response_mask"])


def test_weights_scale_the_update():
    """With every ratio at 1.5 the loss of the step, and with it the gradient, is 1.5 times as large."""
    norms = []
    for extra in ([], ["algorithm.corrections=[truncate]"]):
        parts = training("algorithm.old_logprobs=recompute", "learner.max_grad_norm=1e9", *extra)
        rollouts = with_logprobs(batch(), policy_logprobs(parts, batch()) - math.log(1.5))
        norms.append(parts.learner.actor.update(parts.experience.make(rollouts, version=0).data)["grad_norm"])
    assert norms[1] == pytest.approx(1.5 * norms[0], rel=1e-4)


def test_the_optimal_baseline_sees_the_weights():
    settings = ["algorithm.advantage=optimal_token_baseline", "algorithm.old_logprobs=recompute"]
    advantages = []
    for extra in ([], ["algorithm.corrections=[truncate]"]):
        parts = training(*settings, *extra)
        rollouts = off_by(parts, batch(), 5.0, row=3, column=0)
        advantages.append(parts.experience.make(rollouts, version=0).data.batch["advantages"])
    assert (advantages[0] - advantages[1]).abs().max() > 0.01


def test_remax_measures_from_the_greedy_reward():
    rollouts = batch(baselines=(0.25, 0.75))
    made = training("algorithm.advantage=remax").experience.make(rollouts, version=0).data.batch
    baselines = torch.tensor([0.25] * 4 + [0.75] * 4)
    assert_close(made["advantages"], (scores(rollouts) - baselines)[:, None] * made["response_mask"])


def test_a_critic_gives_values_and_its_advantages():
    settings = ["algorithm.advantage=gae", "algorithm.advantage_args.whitened=false", "critic.enabled=true"]
    made = training(*settings).experience.make(batch(), version=0).data.batch
    # The head starts at zero: nothing is expected, so every token's return is the whole reward.
    assert not made["values"].any()
    assert_close(made["returns"], scores(batch())[:, None] * made["response_mask"])
    assert_close(made["advantages"], made["returns"])


def test_turns_are_what_stands_between_tokens_of_others():
    """Two turns; the second, which has the reward, is worth half of it to the first."""
    prompt = tiny.prompt()
    sample = trajectory("row", 0, prompt.tokens, 4, loss_mask=(1, 0, 1, 1), reward=1.0)
    settings = ["algorithm.advantage=gae_turn", "algorithm.advantage_args={gamma: 0.5, whitened: false}"]
    parts = training(*settings, "critic.enabled=true")
    made = parts.experience.make(RolloutBatch((Group(prompt, (sample,)),)), version=0).data.batch
    assert_close(made["advantages"], torch.tensor([[0.5, 0.0, 1.0, 1.0]]))


@pytest.mark.parametrize(("advantage", "column"), [("remax", "baselines"), ("gdpo", "reward_parts")])
def test_a_missing_column_is_named_with_who_needs_it(advantage, column):
    experience = training(f"algorithm.advantage={advantage}").experience
    with pytest.raises(MissingColumn, match=f"algorithm.advantage = {advantage} needs the column '{column}'"):
        experience.make(batch(), version=0)


def with_parts(rollouts: RolloutBatch, *parts: object) -> RolloutBatch:
    (group,) = rollouts.groups
    samples = [replace(each, info={"reward_parts": part}) for each, part in zip(group.trajectories, parts, strict=True)]
    return RolloutBatch((replace(group, trajectories=tuple(samples)),))


def test_several_rewards_come_from_beside_the_score():
    """The second reward decides: the first is the same in every sample."""
    rollouts = with_parts(batch(num_groups=1, num_samples=2), [1, 0.2], [1, 0.8])
    made = training("algorithm.advantage=gdpo").experience.make(rollouts, version=0).data.batch
    assert made["advantages"][0, 0] < 0 < made["advantages"][1, 0]


@pytest.mark.parametrize("parts", [([1, 2], [1]), (["a"], ["b"]), (0.5, 0.5)])
def test_rewards_that_are_no_equal_lists_are_refused(parts):
    rollouts = with_parts(batch(num_groups=1, num_samples=2), *parts)
    with pytest.raises(DataError, match=r"reward_parts must be lists.*fix reward\.function"):
        training("algorithm.advantage=gdpo").experience.make(rollouts, version=0)
