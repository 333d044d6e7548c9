"""Checkpoints that cannot be used say so."""

from __future__ import annotations

import contextlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner.test_engine import actor, engine, experience, weights

from headwater.core.errors import DamagedCheckpoint, RunError
from headwater.learner import sharded_checkpoint
from headwater.learner.ranks import Ranks
from headwater.models.load import load_model


def saved(tmp_path, train_engine=None):
    train_engine = train_engine or engine()
    actor(train_engine).update(experience(1))
    train_engine.save(tmp_path)
    return train_engine


def test_another_architecture_is_refused(tmp_path):
    saved(tmp_path)
    other = engine(load_model("tiny:llama", dtype="float32", device="cpu", seed=0))
    before = weights(other)
    with pytest.raises(RunError, match=r"a checkpoint of another model: (has no|holds) .*resume with the model"):
        other.load(tmp_path)
    assert torch.equal(weights(other), before)


def test_another_size_is_refused(tmp_path):
    smaller = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    smaller.config.vocab_size = 300
    smaller.resize_token_embeddings(300)
    saved(tmp_path)
    with pytest.raises(RunError, match=r"holds model\.model\.embed_tokens\.weight as \(\d+, \d+\), not \(300, \d+\)"):
        engine(smaller).load(tmp_path)


def shard(folder):
    (file,) = (folder / "train").glob("*.safetensors")
    return file


def test_truncated_and_missing_files_are_named_before_anything_is_read(tmp_path):
    saved(tmp_path)
    file, other = shard(tmp_path), engine()
    content, before = file.read_bytes(), weights(other)
    for damaged in (b"", content[:100], content[:-1], bytes(len(content)), None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        size = "is missing" if damaged is None else f"has {len(damaged)} bytes"
        with pytest.raises(
            DamagedCheckpoint, match=rf"damaged checkpoint \(shard_00000.* {size}.*older one with --step"
        ):
            other.load(tmp_path)
        assert torch.equal(weights(other), before)


def test_a_missing_or_damaged_index_is_named_as_damaged(tmp_path):
    saved(tmp_path)
    index = tmp_path / "train" / "index.json"
    good = json.loads(index.read_text())
    elsewhere = {
        name: [{**each, "file": "../x.safetensors"} for each in good["pieces"][name]] for name in good["pieces"]
    }
    cut = {name: parts[1:] for name, parts in good["pieces"].items()}
    changed = [{**good, "pieces": elsewhere}, {**good, "pieces": cut}, {**good, "format": "other"}, []]
    for content in (b"", b"nonsense", b"\xff", b"[" * 100_000, *(json.dumps(each).encode() for each in changed), None):
        index.unlink() if content is None else index.write_bytes(content)
        with pytest.raises(DamagedCheckpoint, match="damaged checkpoint"):
            engine().load(tmp_path)


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_code_of_a_checkpoint_is_executed(tmp_path):
    mark = tmp_path / "executed"
    for name in ("index.json", ".metadata", "shard_00000_of_00001.safetensors"):
        saved(tmp_path / name)
        (tmp_path / name / "train" / name).write_bytes(pickle.dumps(Payload(mark)))
        with contextlib.suppress(DamagedCheckpoint):
            engine().load(tmp_path / name)
    assert not mark.exists()


def test_without_the_optimiser_a_checkpoint_is_a_third_and_the_next_step_uses_new_averages(tmp_path):
    first = saved(tmp_path / "whole")
    first.save(tmp_path / "weights", with_optimizer=False)
    assert shard(tmp_path / "weights").stat().st_size < 0.4 * shard(tmp_path / "whole").stat().st_size
    second = engine()
    second.load(tmp_path / "weights")
    assert torch.equal(weights(second), weights(first))
    assert second.optimizer.num_steps == first.optimizer.num_steps
    assert not any(optimizer.state for optimizer in second.optimizer.optimizers)
    actor(second).update(experience(2))


class Apart(Ranks):
    """A first rank, and a second one that writes its shards to the disk of another machine."""

    def gather(self, value):
        elsewhere = {name: replace(piece, file="shard_00001_of_00002.safetensors") for name, piece in value.items()}
        return [value, elsewhere]


def test_a_shard_that_is_not_beside_the_others_fails_the_checkpoint(tmp_path):
    train_engine = engine()
    args = (train_engine.module.model, train_engine.optimizer, Apart())
    with pytest.raises(
        RunError, match=r"written shard_00001_of_00002\.safetensors, but .* not here.*run\.root must be"
    ):
        sharded_checkpoint.save(tmp_path, *args)
    (tmp_path / "train" / "shard_00001_of_00002.safetensors").touch()
    sharded_checkpoint.save(tmp_path, *args)


def test_a_checkpoint_from_before_the_first_step_goes_on_as_a_fresh_run(tmp_path):
    engine().save(tmp_path)
    fresh, loaded = engine(), engine()
    actor(loaded).update(experience(1))  # whatever was learned and averaged before is forgotten
    loaded.load(tmp_path)
    for each in (fresh, loaded):
        actor(each).update(experience(2))
    assert torch.equal(weights(loaded), weights(fresh))
