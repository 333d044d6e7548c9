"""A snapshot holds what a checkpoint would have held, whatever happens to the weights afterwards."""

from __future__ import annotations

import threading

import pytest
import tiny
import torch
from learner.test_engine import experience

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


def test_the_memory_of_the_copies_is_allocated_before_the_first_snapshot(tmp_path, monkeypatch):
    data = experience(1)
    zeros = torch.zeros_like(data.batch["advantages"])
    data = data.with_columns(
        tensors=dict.fromkeys(("values", "returns", "reference_logprobs"), zeros), meta_info={"version": 100}
    )
    monkeypatch.setattr(snapshot, "_BLOCK", 1 << 18)
    for name, recipe in {"ppo": ["quickstart", "ppo"], "lora": ["quickstart-lora"]}.items():
        may_allocate, threads = threading.Event(), []

        def allocate(num_bytes: int, wait=may_allocate.wait, threads=threads) -> torch.Tensor:
            assert wait(300)
            threads.append(threading.current_thread().name)
            return torch.empty(num_bytes, dtype=torch.uint8)

        monkeypatch.setattr(snapshot, "_ordinary", allocate)
        learner = build_learner(LearnerSpec(load_config(recipe).config, MODEL, MODEL))
        learner.prepare_snapshot()
        learner.update(data)
        assert not threads, "an update does not wait for memory that only a checkpoint needs"
        may_allocate.set()
        learner._snapshots._wait_for_places()
        num_blocks = len(threads)
        assert num_blocks > 2
        assert all(each.startswith("snapshot") for each in threads)
        learner.save(tmp_path / f"{name} saved")
        assert "exp_avg" in (tmp_path / f"{name} saved" / "train" / "index.json").read_text()
        taken = learner.snapshot(tmp_path / f"{name} later")
        assert taken is not None
        learner.settle()
        taken.write()
        assert len(threads) == num_blocks, "the snapshot needed more memory than was prepared"
        assert files(tmp_path / f"{name} later") == files(tmp_path / f"{name} saved"), name
        learner.close()


def test_a_snapshot_that_comes_before_its_memory_is_complete_too(tmp_path, monkeypatch):
    batch = pad_trajectories([tiny.trajectory(seed) for seed in range(4)], tiny.tokenizer().pad_token_id)
    may_allocate = threading.Event()
    ordinary = snapshot._ordinary
    monkeypatch.setattr(snapshot, "_ordinary", lambda size: may_allocate.wait(300) and ordinary(size))
    learner = build_learner(LearnerSpec(load_config(["quickstart"]).config, MODEL, MODEL))
    learner.prepare_snapshot()
    learner.supervise(batch)
    learner.save(tmp_path / "saved")
    taken = learner.snapshot(tmp_path / "later")
    assert taken is not None
    may_allocate.set()
    learner.supervise(batch)  # waits for the copy, which waits for its memory
    taken.write()
    assert files(tmp_path / "later") == files(tmp_path / "saved")
    learner.close()


def test_nothing_is_prepared_if_main_memory_is_short(monkeypatch):
    sizes = []
    monkeypatch.setattr(snapshot, "_ordinary", lambda size: sizes.append(size) or torch.empty(size, dtype=torch.uint8))
    learner = build_learner(LearnerSpec(load_config(["quickstart"]).config, MODEL, MODEL))
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "available_ram", lambda: 1 << 16)
        learner.prepare_snapshot()
    learner.close()
    assert not sizes


def test_a_learner_that_is_closed_does_not_finish_its_preparation(monkeypatch):
    sizes = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        assert learner._snapshots._is_closed.wait(300)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(snapshot, "_ordinary", allocate)
    monkeypatch.setattr(snapshot, "_BLOCK", 1 << 16)
    learner = build_learner(LearnerSpec(load_config(["quickstart"]).config, MODEL, MODEL))
    learner.prepare_snapshot()
    learner.close()
    assert len(sizes) <= 1


def test_memory_that_cannot_be_page_locked_is_replaced_by_other_memory(monkeypatch, caplog):
    def refuse(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(snapshot, "page_locked", refuse)
    assert len(snapshot._page_locked_if_possible(64)) == 64
    assert "out of memory" in caplog.text


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
