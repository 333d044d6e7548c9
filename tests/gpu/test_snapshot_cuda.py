"""A snapshot on a GPU is the checkpoint of its moment, and a device without memory is told with a remedy."""

from __future__ import annotations

import pytest
import tiny
import torch

from headwater.config.load import load_config
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


def test_no_memory_is_recognised():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**42, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
