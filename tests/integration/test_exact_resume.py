"""What a run keeps beside its policy is resumed to the last bit: critic, reference, adapters, rates, coefficients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import CUT_DOWN, headwater, metrics, same_weights, train_here, weights
from safetensors.torch import load_file, save_file

from headwater.config.builtin import split_arguments
from headwater.observe.manifest import seal

PPO = [
    "quickstart", "ppo", *CUT_DOWN, "warm_start.num_steps=2", "critic.num_warmup_steps=1",
    "algorithm.kl_in_reward=0.1", "algorithm.kl_estimator=k1",
    "algorithm.kl_target=0.01", "algorithm.kl_horizon=16",
]  # fmt: skip
LORA = ["quickstart-lora", *CUT_DOWN, "warm_start.num_steps=2"]


def slowly_warmed_up(recipe: list[str], tmp_path) -> list[str]:
    """With a rate that still rises when the run is resumed. A recipe may say so of a run that is cut short."""
    file = tmp_path / "recipe.yaml"
    names, settings = split_arguments(recipe)
    file.write_text(f"extends: [{', '.join(names)}]\nlearner: {{num_warmup_steps: 3}}\n")
    return [str(file), *settings]


def trained(run, step: int, part: str) -> dict[str, torch.Tensor]:
    """What was trained and its optimiser."""
    folder = run / "checkpoints" / f"step_{step:06d}" / part / "train"
    return load_file(folder / "shard_00000_of_00001.safetensors")


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        pytest.param(PPO, ("", "critic"), id="ppo"),
        pytest.param(LORA, ("",), id="lora", marks=pytest.mark.slow),
    ],
)
def test_two_steps_and_another_are_three(recipe, parts, tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    recipe = slowly_warmed_up(recipe, tmp_path)
    train_here(*recipe, f"run.root={tmp_path}", "run.name=straight", "trainer.total_steps=3")
    train_here(*recipe, f"run.root={tmp_path}", "run.name=resumed", "trainer.total_steps=2")
    halfway = weights(resumed, 2)
    train_here("--resume", resumed, "trainer.total_steps=3")
    assert not same_weights(halfway, weights(resumed, 3))
    assert same_weights(weights(resumed, 3), weights(straight, 3))
    for part in parts:
        one, other = (trained(run, 3, part) for run in (straight, resumed))
        assert one
        assert same_weights(one, other)
    timed = ("time", "throughput", "memory", "engine", "mfu")
    for one, other in zip(metrics(straight, "train"), metrics(resumed, "train"), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(timed)} == {
            k: v for k, v in other.items() if not k.startswith(timed)
        }
    for part in parts[-1:]:  # of a policy: test_damaged_checkpoint.py
        assert_changed_weights_are_refused(resumed, 3, part)


def assert_changed_weights_are_refused(run: Path, step: int, part: str) -> None:
    """Noise in one of the trained weights, with a manifest that fits: only the ledger knows what was trained."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    file = folder / part / "train" / "shard_00000_of_00001.safetensors"
    content, tensors = file.read_bytes(), load_file(file)
    name = next(name for name in tensors if name.startswith("model."))
    save_file({**tensors, name: torch.randn_like(tensors[name])}, file)
    seal(folder)
    result = headwater("train", "--resume", run, f"trainer.total_steps={step + 1}")
    assert result.code == 2, result.stdout
    assert f"{folder}: its weights are not those that step {step} trained (checksum float32-" in result.stderr
    file.write_bytes(content)


@pytest.mark.slow
def test_a_steered_coefficient_goes_on_and_a_fixed_one_is_the_configs(tmp_path):
    train_here(*PPO, f"run.root={tmp_path}", "run.name=steered", "trainer.total_steps=3")
    coefficients = [each["kl/coefficient"] for each in metrics(tmp_path / "steered", "train")]
    assert coefficients[0] == 0.1
    assert len(set(coefficients)) == 3
    state = json.loads((tmp_path / "steered" / "checkpoints" / "step_000003" / "state.json").read_text())
    train_here("--resume", tmp_path / "steered", "trainer.total_steps=4")
    assert metrics(tmp_path / "steered", "train")[-1]["kl/coefficient"] == state["kl_coefficient"]
    train_here(
        "--resume", tmp_path / "steered", "trainer.total_steps=5", "algorithm.kl_target=0", "algorithm.kl_in_reward=0.7"
    )
    assert metrics(tmp_path / "steered", "train")[-1]["kl/coefficient"] == 0.7
