from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.core.errors import DiskFull, ModelError
from headwater.models.load import load_model, load_tokenizer, save_model


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0), load_tokenizer("tiny:qwen3")


def test_parents_are_made_and_an_empty_folder_is_used(pair: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "a" / "b", tmp_path / "empty"):
        assert save_model(*pair, target) == target
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in target.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty"]


def test_weights_are_as_readable_as_the_config(pair: tuple[Any, Any], tmp_path: Path) -> None:
    folder = save_model(*pair, tmp_path / "model")
    modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_a_folder_with_something_in_it_is_left_alone(pair: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists and is not empty; remove it or name another folder"):
        save_model(*pair, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_save_leaves_nothing(pair: tuple[Any, Any], tmp_path: Path) -> None:
    class FullDisk:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull, match=r"the disk is full. The disk at /.* has .* free of .*then resume"):
        save_model(pair[0], FullDisk(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(pair: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot save the model to"):
        save_model(*pair, tmp_path / "file" / "model")
