"""Adapters in peft's format: what is written, with or without the weights below them, and how long it stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from unit.engine.adapters import ALPHA, MODEL, RANK, Adapted

from headwater.core.errors import WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.models.load import load_model
from headwater.weights.adapter_files import AdaptedFiles, adapted_layers, written_adapters

DTYPE = torch.float32


def update(policy: Adapted, version: int, *, alone: bool) -> WeightUpdate:
    return WeightUpdate(version, policy.unmerged_shapes(alone), policy.export_unmerged(alone), adapters_alone=alone)


def written(policy: Adapted, version: int, folder: Path, *, alone: bool) -> AdaptedFiles:
    return written_adapters(update(policy, version, alone=alone), DTYPE, alpha=ALPHA, shared_folder=str(folder))


def test_peft_computes_the_merged_model_from_what_is_written(tmp_path: Path) -> None:
    policy = Adapted("float32", "cpu")
    policy.train(3)
    files = written(policy, 3, tmp_path, alone=False)
    assert files.weights is not None
    base = load_model(MODEL, dtype="float32", device="cpu", seed=7)
    base.load_state_dict(load_file(files.weights.path), strict=False)
    merged = load_model(MODEL, dtype="float32", device="cpu", seed=7)
    merged.load_state_dict({name: each for bucket in policy.export() for name, each in bucket}, strict=False)
    beside = peft.PeftModel.from_pretrained(base, str(files.path.parent))
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert torch.allclose(beside(tokens).logits, merged(tokens).logits, atol=1e-5)
    settings = json.loads((files.path.parent / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (RANK, ALPHA)
    assert settings["target_modules"] == adapted_layers(policy.unmerged_shapes(True)) == sorted(policy.layers)
    for each in files.path.parent.iterdir():
        assert os.stat(each).st_mode & 0o044 == 0o044, "other users of a shared folder may read it"
    files.discard()
    assert list(tmp_path.iterdir()) == []


def test_the_weights_stay_while_adapters_follow_one_another(tmp_path: Path) -> None:
    policy = Adapted("float32", "cpu")
    newest = written(policy, 1, tmp_path, alone=False)
    weights = newest.weights
    assert weights is not None
    for version in (2, 3):
        alone = written(policy, version, tmp_path, alone=True)
        assert alone.weights is None
        newest, older = alone.over(newest), newest
        older.discard()
        assert {each.name.rpartition("-")[2] for each in tmp_path.iterdir()} == {"v000001", f"v{version:06d}"}
    assert newest.weights is weights
    again = written_adapters(WeightUpdate(3, {}, (), file=newest), DTYPE, alpha=ALPHA)
    newest.discard()
    assert weights.path.exists()
    assert again.path.exists()
    again.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    policy = Adapted("float32", "cpu")
    with pytest.raises(WeightsError, match="an update without adapters"):
        written_adapters(WeightUpdate.of(1, policy.model.named_parameters()), DTYPE, alpha=ALPHA)
    first = next(iter(policy.adapters))
    policy.adapters[first] = torch.full_like(policy.adapters[first], torch.inf)
    for alone in (True, False):
        with pytest.raises(WeightsError, match="NaN or infinite"):
            written(policy, 1, tmp_path, alone=alone)
    policy.adapters[first] = torch.zeros(RANK + 1, policy.adapters[first].shape[1])
    with pytest.raises(WeightsError, match=r"ranks \[4, 5\]"):
        written(policy, 1, tmp_path, alone=True)
    announced = update(policy, 1, alone=True)
    with pytest.raises(WeightsError, match="was not announced"):
        written_adapters(
            WeightUpdate(1, announced.shapes, policy.export_unmerged(False)), DTYPE, alpha=ALPHA,
            shared_folder=str(tmp_path),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
