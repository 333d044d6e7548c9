"""A snapshot on a GPU is the checkpoint of its moment, and a device without memory is told with a remedy."""

from __future__ import annotations

import threading

import pytest
import tiny
import torch

from headwater.config.load import load_config
from headwater.learner import snapshot as saving
from headwater.learner.build import LearnerSpec, build_learner
from headwater.rollout.group import pad_trajectories
from headwater.trainer.memory_advice import is_out_of_memory

MODEL = "tiny:qwen3"


def files(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_snapshot_is_the_checkpoint_of_its_moment_while_passes_continue(tmp_path):
    batch = pad_trajectories([tiny.trajectory(seed) for seed in range(4)], tiny.tokenizer().pad_token_id)
    forms = {"ppo": ["quickstart", "ppo"], "lora": ["quickstart-lora"], "offloaded": ["quickstart", "ppo"]}
    for name, recipe in forms.items():
        offload = ["learner.offload_optimizer=true"] if name == "offloaded" else []
        config = load_config(recipe, ["model.device=cuda", "model.dtype=bfloat16", *offload]).config
        learner = build_learner(LearnerSpec(config, MODEL, MODEL))
        for number in range(2):
            learner.supervise(batch)
            learner.save(tmp_path / f"{name} saved {number}")
            snapshot = learner.snapshot(tmp_path / f"{name} later {number}")
            assert snapshot is not None
            learner.compute(batch, ["logprobs"])
            learner.supervise(batch)
            snapshot.write()
            assert files(tmp_path / f"{name} later {number}") == files(tmp_path / f"{name} saved {number}"), name
        learner.close()


@pytest.mark.parametrize("form", ["ppo", "lora", "offloaded"])
def test_the_first_snapshot_finds_its_page_locked_memory(form, tmp_path, monkeypatch):
    """It is allocated before, on a thread, in pieces, while updates run; then a snapshot allocates nothing."""
    monkeypatch.setattr(saving, "_BLOCK", 1 << 18)
    allocated: list[tuple[str, bool]] = []
    page_locked = saving.page_locked

    def noted(num_bytes: int) -> torch.Tensor:
        block = page_locked(num_bytes)
        allocated.append((threading.current_thread().name, block.is_pinned()))
        return block

    monkeypatch.setattr(saving, "page_locked", noted)
    recipe = ["quickstart-lora"] if form == "lora" else ["quickstart", "ppo"]
    offload = ["learner.offload_optimizer=true"] if form == "offloaded" else []
    config = load_config(recipe, ["model.device=cuda", "model.dtype=bfloat16", *offload]).config
    learner = build_learner(LearnerSpec(config, MODEL, MODEL))
    learner.prepare_snapshot()
    data = pad_trajectories([tiny.trajectory(seed) for seed in range(4)], tiny.tokenizer().pad_token_id)
    names = ("old_logprobs", "advantages", "values", "returns", "reference_logprobs")
    ones = dict.fromkeys(names, torch.ones_like(data.batch["rollout_logprobs"]))
    data = data.with_columns(tensors=ones, meta_info={"version": 100})
    learner.update(data)
    assert learner.status().num_optimizer_steps > 0
    learner._snapshots._wait_for_places()
    num_blocks = len(allocated)
    assert num_blocks > 2
    assert all(name.startswith("snapshot") and is_pinned for name, is_pinned in allocated)
    learner.save(tmp_path / "saved")
    snapshot = learner.snapshot(tmp_path / "later")
    assert snapshot is not None
    learner.update(data)
    snapshot.write()
    assert len(allocated) == num_blocks
    assert files(tmp_path / "later") == files(tmp_path / "saved")
    learner.close()


def test_no_memory_is_recognised():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**42, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
