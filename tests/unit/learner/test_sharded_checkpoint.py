"""Checkpoints that cannot be used say so."""

from __future__ import annotations

import pytest
import torch
from learner.test_engine import actor, engine, experience, weights

from headwater.core.errors import RunError
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


@pytest.mark.parametrize("size", [0, 100])
def test_a_truncated_file_is_named_as_damaged(tmp_path, size):
    saved(tmp_path)
    for file in (tmp_path / "train").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:size])
    other = engine()
    before = weights(other)
    with pytest.raises(RunError, match=rf"damaged checkpoint \(\w+\.distcp has {size} bytes.*older one with --step"):
        other.load(tmp_path)
    assert torch.equal(weights(other), before)


def test_damage_that_shows_half_way_says_that_the_weights_are_spoiled(tmp_path):
    saved(tmp_path)
    for file in (tmp_path / "train").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RunError, match=r"damaged checkpoint .*partly overwritten and must not be used.*--step"):
        engine().load(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_missing_or_damaged_metadata_is_named_as_damaged(tmp_path, content):
    saved(tmp_path)
    metadata = tmp_path / "train" / ".metadata"
    if content is None:
        metadata.unlink()
    else:
        metadata.write_bytes(content)
    with pytest.raises(RunError, match="damaged checkpoint"):
        engine().load(tmp_path)


def test_a_checkpoint_from_before_the_first_step_goes_on_as_a_fresh_run(tmp_path):
    engine().save(tmp_path)
    fresh, loaded = engine(), engine()
    actor(loaded).update(experience(1))  # whatever was learned and averaged before is forgotten
    loaded.load(tmp_path)
    for each in (fresh, loaded):
        actor(each).update(experience(2))
    assert torch.equal(weights(loaded), weights(fresh))
