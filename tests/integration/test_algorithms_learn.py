"""Every algorithm's recipe runs, reports what it does, and learns."""

from __future__ import annotations

import pytest
from command import CUT_DOWN, metrics, same_weights, train_here, warm_quickstart, weights

from headwater.config.builtin import builtin_recipes

RECIPES = [*(["quickstart", recipe.name] for recipe in builtin_recipes() if recipe.is_part), ["quickstart-lora"]]
FOR_A_TINY_MODEL = {"ppo": ["critic.learning_rate=1e-3"], "dapo": ["reward.overlong_tokens=2"]}
NUM_STEPS = 20


@pytest.mark.slow
@pytest.mark.parametrize("recipes", RECIPES, ids=lambda recipes: recipes[-1])
def test_held_out_reward_rises(recipes, tmp_path, tmp_path_factory):
    settings = [f"run.root={tmp_path}", "run.name=run", *FOR_A_TINY_MODEL.get(recipes[-1], [])]
    if recipes[0] == "quickstart":  # the other recipe has its own supervised start
        settings += [f"model.path={warm_quickstart(tmp_path_factory)}", "warm_start.num_steps=0"]
    train_here(*recipes, *settings, f"trainer.total_steps={NUM_STEPS}", f"eval.every_steps={NUM_STEPS}")
    first, last = (each["reward/mean"] for each in metrics(tmp_path / "run", "eval"))
    assert first < 0.3
    assert last > 0.6


def train_small(tmp_path, recipe: str, *settings: str) -> list[dict]:
    more = FOR_A_TINY_MODEL.get(recipe, [])
    train_here("quickstart", recipe, *CUT_DOWN, f"run.root={tmp_path}", f"run.name={recipe}", *more, *settings)
    return metrics(tmp_path / recipe, "train")


def test_grpo_reports_divergence_corrections_and_staleness(tmp_path):
    settings = ["algorithm.old_logprobs=metrics", "algorithm.corrections=[truncate, reject]"]
    first, second = train_small(tmp_path, "grpo", *settings)
    assert {
        "actor/loss", "actor/reference_kl", "actor/clip_fraction", "actor/entropy", "kl/reference", "kl/coefficient",
        "correction/truncate/truncated_fraction", "correction/reject/rejected_fraction", "correction/kept_fraction",
        "correction/effective_sample_size", "rollout_gap/ratio_p99",
        "staleness/lag_0", "rollout_logprob_gap", "rollout_gap/k3_kl", "proximal_error_abs",
    } <= first.keys()  # fmt: skip
    assert first["staleness/lag_0"] == first["correction/kept_fraction"] == 1.0
    assert first["kl/coefficient"] == 0.0
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl/reference"] > first["kl/reference"]


def test_ppo_teaches_its_critic_before_its_policy(tmp_path):
    settings = ["critic.num_warmup_steps=1", "trainer.checkpoint_every_steps=1", "trainer.total_steps=3"]
    warm_up, *rest = train_small(tmp_path, "ppo", *settings, "trainer.keep_checkpoints=3")
    assert warm_up["critic/optimizer_steps"] == 1
    assert {"critic/loss", "critic/value", "critic/grad_norm"} <= warm_up.keys()
    assert not any(name.startswith("actor/") for name in warm_up)
    assert [each["actor/optimizer_steps"] for each in rest] == [1, 1]
    # The head starts at zero and learns that rewards are above it.
    assert warm_up["critic/value"] == 0.0 < rest[0]["critic/value"]
    run = tmp_path / "ppo"
    assert not same_weights(weights(run, 1), weights(run, 2))


def test_without_its_critic_a_recipe_does_not_wait_for_it(tmp_path):
    off = ["critic.enabled=false", "algorithm.advantage=reinforce_plus_plus", "algorithm.advantage_args={}"]
    (only,) = train_small(tmp_path, "ppo", *off, "trainer.total_steps=1")
    assert only["actor/optimizer_steps"] == 1


def test_dapo_counts_what_it_filters_apart_from_what_failed(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(ground_truth in '02468' and len(solution_str) % 2)\n"
    )
    settings = [f"reward.function={file}:compute_score", "rollout.num_samples_per_prompt=4"]
    for each in train_small(tmp_path, "dapo", *settings):
        assert each["groups/informative_fraction"] == 1.0
        assert each["groups/filtered"] > 0
        assert each["groups/dropped"] == 0
        assert each["reward/overlong_penalty"] < 0
