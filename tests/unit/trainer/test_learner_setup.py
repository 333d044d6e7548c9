"""What a config makes of the learner: schedules, the reference, and who leaves the device for a rollout."""

from __future__ import annotations

import json

import pytest
import torch
from torch.testing import assert_close
from trainer.experience_parts import batch, move_policy, policy_logprobs, training
from trainer.test_experience_reward_model import save_judge

from headwater.core.errors import ConfigError
from headwater.rollout.group import pad_trajectories


def test_the_policy_s_rate_falls_over_the_steps_it_takes():
    parts = training(
        "critic.enabled=true", "algorithm.advantage=gae", "critic.num_warmup_steps=1", "trainer.total_steps=2",
        "eval.every_steps=0", "learner.schedule=linear", "learner.num_minibatches=2", "learner.num_warmup_steps=0",
        "learner.learning_rate=1e-3", "critic.learning_rate=1e-3",
    )  # fmt: skip
    experience = parts.experience.make(batch(), version=0).data
    # The critic takes four optimiser steps in all, the policy two.
    assert parts.learner.critic.update(experience)["learning_rate"] == pytest.approx(1e-3 * (1 + 3 / 4) / 2)
    assert parts.learner.actor.update(experience)["learning_rate"] == pytest.approx(1e-3 * (1 + 1 / 2) / 2)


def test_a_reference_starts_as_the_policy_also_with_checkpointed_layers(tmp_path):
    parts = training(
        "algorithm.kl_in_loss=0.1", "learner.checkpoint_activations=true", "learner.skip_zero_advantages=false"
    )
    rollouts = batch()
    move_policy(parts, rollouts)
    data = pad_trajectories(rollouts.trajectories, 0)
    before = parts.learner.compute(data, ["reference_logprobs"])["reference_logprobs"]
    parts.learner.keep_reference(tmp_path / "reference")
    moved = parts.learner.compute(data, ["reference_logprobs"])["reference_logprobs"]
    assert_close(moved, policy_logprobs(parts, rollouts))
    assert not torch.equal(moved, before)
    assert (tmp_path / "reference" / "config.json").exists()


def test_every_model_of_the_learner_leaves_for_a_rollout(tmp_path, monkeypatch):
    save_judge(tmp_path)
    parts = training(
        "algorithm.kl_in_reward=0.1", "critic.enabled=true", "algorithm.advantage=gae", f"reward.model={tmp_path}"
    )
    models = {
        "judge": parts.learner.reward_model.engine,
        "reference": parts.learner.reference,
        "critic": parts.learner.critic.engine,
        "policy": parts.learner.actor.engine,
    }
    calls: list[str] = []
    for name, model in models.items():
        for method in ("offload", "onload"):
            monkeypatch.setattr(model, method, lambda call=f"{method} {name}": calls.append(call))
    parts.learner.offload()
    assert sorted(calls) == sorted(f"offload {name}" for name in models)
    calls.clear()
    parts.learner.onload()
    assert sorted(calls) == sorted(f"onload {name}" for name in models)


def test_data_smaller_than_a_batch_is_refused_with_both_numbers_and_what_to_do(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "1+2="}], "data_source": "arithmetic", "ground_truth": "3"}
    file.write_text((json.dumps(row) + "\n") * 3)
    settings = [
        f"data.train={file}", "data.task_args={}", "data.num_train_rows=2048", "data.num_eval_rows=256",
        "eval.num_prompts=256", "eval.before=false", "eval.after=false", "eval.every_steps=0",
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"trainer\.num_prompts_per_step = 4: data\.train has only 3 prompts.* lower it to 3 or less"
    ):
        training(*settings, "trainer.num_prompts_per_step=4")
    assert len(training(*settings, "trainer.num_prompts_per_step=3").train_data) == 3
