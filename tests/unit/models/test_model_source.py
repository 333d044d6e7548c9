from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.core.errors import ModelError
from headwater.models.source import resolve_model


def test_kinds() -> None:
    for path, kind in (
        ("tiny:qwen3", "tiny"),
        ("smollm2", "smollm2"),
        ("Qwen/Qwen2.5-0.5B", "hub"),
        ("gpt2", "hub"),
        ("./smollm2", "folder"),
        ("../model", "folder"),
        (".", "folder"),
        ("~/models/mine", "folder"),
        ("/models/mine", "folder"),
        ("runs/quick/final", "folder"),
    ):
        assert resolve_model(path).kind == kind, path


def test_an_existing_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("out/model").kind == "hub"
    (tmp_path / "out" / "model").mkdir(parents=True)
    source = resolve_model("out/model")
    assert source.kind == "folder"
    assert source.folder == Path("out/model")


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m").folder == tmp_path / "m"


def test_only_folders_have_a_folder() -> None:
    with pytest.raises(ValueError, match="is a hub model"):
        _ = resolve_model("org/name").folder


def test_nonsense_is_refused_with_the_possible_forms() -> None:
    for path in ("", "two words", "tinyqwen3:", "org/na me", "-x/y"):
        with pytest.raises(ModelError, match=r"give \./folder, org/name, tiny:<preset> or smollm2"):
            resolve_model(path)


def test_names_are_resolved_without_torch() -> None:
    code = (
        "import sys; import headwater.models.source, headwater.models.builtin.smollm2, headwater.models.builtin.tiny; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
