"""A checkpoint that was changed after it was saved is never used silently."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from command import CUT_DOWN, Result, headwater, same_weights, weights
from safetensors.torch import load_file, save_file

from headwater.observe.manifest import damage, seal
from headwater.observe.run_directory import RunDirectory

PPO = [
    "quickstart", "ppo", *CUT_DOWN, "warm_start.num_steps=1", "algorithm.kl_in_reward=0.1",
    "algorithm.kl_estimator=k1", "critic.num_warmup_steps=0", "eval.before=false", "eval.after=false",
    "trainer.checkpoint_every_steps=1",
]  # fmt: skip
"""A run with everything that a checkpoint can hold: policy, critic, reference."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    result = headwater("train", *PPO, f"run.root={root}", "run.name=ppo")
    assert result.code == 0, result.stderr
    return RunDirectory(root / "ppo")


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained.path, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def resume(run: RunDirectory, *arguments: object) -> Result:
    more = () if any("total_steps" in str(each) for each in arguments) else ("trainer.total_steps=3",)
    result = headwater("train", "--resume", run.path, *more, *arguments)
    assert "Traceback" not in result.stderr + result.stdout
    return result


def test_a_changed_byte_in_any_file_is_refused_with_the_file_and_the_newest_whole_checkpoint(run):
    newest = run.checkpoint(2)
    files = [path for path in newest.rglob("*") if path.is_file()]
    names = {path.relative_to(newest).as_posix() for path in files}
    assert {"state.json", "rollouts.json", "model/model.safetensors", "train/index.json", "manifest.json"} <= names
    assert any(name.startswith("critic/train/shard") for name in names)
    for file in (*files, run.reference / "model.safetensors"):
        content = file.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 4
        file.write_bytes(changed)
        result = resume(run)
        assert result.code == 2, file
        assert f"{file} " in result.stderr
        if file in files:
            assert "the newest intact checkpoint is that of step 1; to use it, add --step 1" in result.stderr
        if "model" in file.name:
            assert headwater("doctor", run.path).code == 1
        if file == run.model(2) / "model.safetensors":
            assert f"{file} has another checksum" in headwater("eval", run.path).stderr
        file.write_bytes(content)
    assert headwater("doctor", run.path).code == 0
    assert not (run.path / "config-2.yaml").exists(), "nothing was changed"


def test_damaged_and_foreign_folders_do_not_stop_a_resume_from_a_whole_one(run, caplog):
    weights_file = run.model(2) / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:1000])
    for name in ("step_000001 (copy)", "step_final"):
        (run.checkpoints / name).mkdir()
    with run.metrics_file.open("ab") as file:
        file.write(b'\xff\xfe\n[1]\nsome other line\n{"kind": "train", "step": 1000}\n{"kind": "eval", "step": 0}\n')
    assert f"{weights_file} has 1000 bytes" in resume(run).stderr
    result = resume(run, "--step", 1)
    assert result.code == 0, result.stderr
    assert "is not a checkpoint and is ignored" in caplog.text
    assert "metrics.jsonl: skipped lines " in caplog.text
    assert [each["step"] for each in run.read_metrics() if each["kind"] == "train"] == [1, 2, 3]
    assert damage(run.checkpoint(3)) == ()


def test_weights_that_the_ledger_does_not_know_are_refused(run):
    """Noise in place of the embeddings, with a manifest that fits."""
    (shard,) = (run.checkpoint(2) / "train").glob("*.safetensors")
    tensors = load_file(shard)
    name = next(name for name in tensors if name.startswith("model.") and "embed" in name)
    save_file({**tensors, name: torch.randn_like(tensors[name])}, shard)
    seal(run.checkpoint(2))
    result = resume(run)
    assert result.code == 2
    assert "its weights are not those that step 2 trained (checksum float32-" in result.stderr
    assert "resume from another checkpoint with --step" in result.stderr


def shard(run: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint(step) / "train" / "shard_00000_of_00001.safetensors")


@pytest.mark.slow
def test_small_checkpoints_resume(run, tmp_path):
    """Exactly if only the export is in bfloat16. Without the optimiser not exactly, which is said."""
    small = RunDirectory(shutil.copytree(run.path, tmp_path / "small"))
    assert resume(run, "trainer.total_steps=4").code == 0
    assert resume(small, "trainer.checkpoint_dtype=bfloat16").code == 0
    assert json.loads((small.model(3) / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in weights(small.path, 3).values()} == {torch.bfloat16}
    assert resume(small, "trainer.total_steps=4", "trainer.checkpoint_optimizer=false").code == 0
    whole, without = shard(run, 4), shard(small, 4)
    assert same_weights(without, {name: each for name, each in whole.items() if name.startswith("model.")})
    result = resume(small, "trainer.total_steps=5")
    assert result.code == 0, result.stderr
    assert "has no optimiser state (trainer.checkpoint_optimizer=false): AdamW starts with new" in result.stdout
    sizes = [sum(path.stat().st_size for path in each.rglob("*")) for each in (run.checkpoint(4), small.checkpoint(4))]
    assert sizes[1] < 0.5 * sizes[0]
