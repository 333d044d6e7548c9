"""Every change of a folder's files is found."""

from __future__ import annotations

import json
import os

import pytest

from headwater.observe import manifest
from headwater.observe.manifest import MANIFEST, damage, seal


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_PIECE_BYTES", 64)
    for name, size in (("model/weights", 1000), ("state.json", 64), ("train/.hidden", 65), ("empty", 0)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(size))
    seal(tmp_path)
    return tmp_path


def test_a_folder_as_it_was_saved_is_whole(folder):
    assert damage(folder) == ()
    for name in ("notes.txt", "model/plot.png", "model/.cache.json"):
        (folder / name).write_text("of the user")
    assert damage(folder) == (), "other files are ignored"


def test_added_files_that_loading_a_model_could_read_are_named(folder):
    """A model.safetensors beside the named shards would be loaded in their place."""
    for name in ("model.safetensors", "pytorch_model.bin", "chat_template.jinja", "modeling.py", "extra/config.json"):
        added = folder / "model" / name
        added.parent.mkdir(exist_ok=True)
        added.write_text("not of this checkpoint")
        for contents in (False, True):
            (found,) = damage(folder, contents=contents)
            assert str(found).startswith(f"{added} was added after the folder was saved"), name
        assert damage(folder, part="model")
        assert not damage(folder, part="train")
        added.unlink()


def test_one_bit_anywhere_is_found_and_the_file_is_named(folder):
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
        content = file.read_bytes()
        for place in (0, 63, 64, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[min(place, len(content) - 1)] ^= 1
            file.write_bytes(changed)
            assert damage(folder)[0].file == file, f"{file.name} at {place}"
        file.write_bytes(content)
        if file.name != MANIFEST:
            assert damage(folder, contents=False) == ()
    assert damage(folder) == ()


def test_truncated_missing_and_exchanged_files_are_found(folder):
    weights = folder / "model" / "weights"
    content = weights.read_bytes()
    weights.write_bytes(content[:500])
    assert [str(each) for each in damage(folder, contents=False)] == [f"{weights} has 500 bytes, not 1000"]
    weights.write_bytes(content[64:128] + content[:64] + content[128:])
    assert "another checksum" in str(damage(folder)[0])
    assert damage(folder, part="train") == ()
    weights.unlink()
    assert [str(each) for each in damage(folder)] == [f"{weights} is missing"]
    weights.mkdir()
    assert [str(each) for each in damage(folder)] == [f"{weights} is missing"]


def test_a_manifest_that_cannot_be_used_is_damage(folder):
    file = folder / MANIFEST
    good = json.loads(file.read_text())
    for content in (b"", b"\xff", b"[]", b"{}", b"[" * 10**5, json.dumps({**good, "files": {}}).encode()):
        file.write_bytes(content)
        assert f"{file} is damaged" in str(damage(folder)[0]), content[:20]
    file.unlink()
    assert f"{file} is missing, so the folder is incomplete" in str(damage(folder)[0])
