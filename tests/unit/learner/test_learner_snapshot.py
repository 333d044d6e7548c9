"""A snapshot holds what a checkpoint would have held, whatever happens to the weights afterwards."""

from __future__ import annotations

import threading

import pytest
import tiny

from headwater.config.load import load_config
from headwater.learner import snapshot
from headwater.learner.build import LearnerSpec, build_learner
from headwater.rollout.group import pad_trajectories

MODEL = "tiny:qwen3"


def files(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_snapshot_is_the_checkpoint_of_its_moment(tmp_path):
    batch = pad_trajectories([tiny.trajectory(seed) for seed in range(4)], tiny.tokenizer().pad_token_id)
    for name, recipe in {"ppo": ["quickstart", "ppo"], "lora": ["quickstart-lora"]}.items():
        learner = build_learner(LearnerSpec(load_config(recipe).config, MODEL, MODEL))
        learner.supervise(batch)
        learner.save(tmp_path / f"{name} saved")
        snapshot = learner.snapshot(tmp_path / f"{name} later")
        assert snapshot is not None
        learner.supervise(batch)
        snapshot.write()
        assert files(tmp_path / f"{name} later") == files(tmp_path / f"{name} saved"), name
        learner.save(tmp_path / f"{name} after")
        changed = files(tmp_path / f"{name} after")
        assert changed["model/model.safetensors"] != files(tmp_path / f"{name} saved")["model/model.safetensors"]
        learner.close()


@pytest.mark.parametrize("save", ["start_snapshot", "save"])
def test_the_next_checkpoint_waits_for_the_files_of_the_last_one(save, tmp_path, monkeypatch):
    learner = build_learner(LearnerSpec(load_config(["quickstart"]).config, MODEL, MODEL))
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    begun, may_write = threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(snapshot.Snapshot, "write", lambda _: (begun.set(), may_write.wait(300)))
        assert learner.start_snapshot(first)
        assert begun.wait(300)
    saving = threading.Thread(target=getattr(learner, save), args=(second,))
    saving.start()
    saving.join(0.2)
    assert saving.is_alive()
    may_write.set()
    saving.join(300)
    assert not saving.is_alive()
    learner.close()
    assert (second / "model").is_dir()
