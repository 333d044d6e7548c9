"""Bypass mode: with the rollout's log-probs as the old ones, the learner corrects in every update."""

from __future__ import annotations

import pytest
from torch.testing import assert_close
from trainer.experience_parts import batch, policy_logprobs, training, with_logprobs

from headwater.core.errors import RunError

CHAIN = [
    "algorithm.policy_loss=reinforce",
    "algorithm.corrections=[reject, truncate, reject]",
    "algorithm.corrections_args={reject: [{upper: 20.0}, {level: sequence, metric: k3, upper: 1.5}], "
    "truncate: {upper: 1.5}}",
    "learner.skip_zero_advantages=false",
]


def shifted(parts, shift: float):
    """Rollouts of the policy itself, except that the engine recorded one row and one token differently."""
    rollouts = batch()
    logprobs = policy_logprobs(parts, rollouts)
    recorded = logprobs.clone()
    recorded[1] -= shift  # two tokens of ratio exp(shift)
    recorded[2, 0] -= 0.25  # a weight of exp(0.25)
    recorded[3, 0] -= 1.0  # a weight above the bound
    return with_logprobs(rollouts, recorded), logprobs


def test_an_update_corrects_the_policy_that_it_trains():
    parts = training(*CHAIN)
    rollouts, logprobs = shifted(parts, shift=4.0)
    experience = parts.experience.make(rollouts, version=0).data
    columns = experience.batch
    assert "correction_weights" not in columns
    assert columns["old_logprobs"].equal(columns["rollout_logprobs"])
    mask = columns["response_mask"]
    kept, weights = mask.clone(), mask.clone()
    kept[1] = 0.0
    weights[2, 0], weights[3, 0] = 2.718281828**0.25, 1.5
    expected = -(columns["advantages"] * logprobs * weights * kept).sum() / mask.sum()
    stats = parts.learner.update(experience)
    assert_close(stats["actor/loss"], float(expected), atol=1e-5, rtol=1e-4)
    num_tokens = float(mask.sum())
    for rule in ("reject_1", "reject_2"):
        assert stats[f"actor/correction/{rule}/rejected_fraction"] == pytest.approx(2 / num_tokens)
    assert stats["actor/correction/truncate/truncated_fraction"] == pytest.approx(3 / num_tokens)
    assert stats["actor/correction/kept_fraction"] == pytest.approx(1 - 2 / num_tokens)
    # The policy has moved, so the next update of the same batch weighs differently.
    again = parts.learner.update(experience)
    assert again["actor/effective_sample_size"] != stats["actor/effective_sample_size"]


def test_corrections_that_leave_nothing_in_an_update_say_so():
    parts = training("algorithm.corrections=[reject]", "algorithm.corrections_args.reject.upper=1e-6")
    experience = parts.experience.make(shifted(parts, shift=0.0)[0], version=0).data
    with pytest.raises(RunError, match=r"algorithm\.corrections = \['reject'\]: left no token of the step"):
        parts.learner.update(experience)
