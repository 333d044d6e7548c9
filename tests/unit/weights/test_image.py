"""Weights written for another process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from headwater.core.errors import WeightsError
from headwater.weights import file, shared_memory
from headwater.weights.file import FileWeights, remove_leftovers
from headwater.weights.shared_memory import SharedWeights
from headwater.weights.source import read_file, shared_tensors


def parameters():
    return [(name, parameter.detach()) for name, parameter in tiny.model().named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read(dtype):
    expected = {name: tensor.to(dtype) for name, tensor in parameters()}
    file, shared = FileWeights(parameters(), dtype), SharedWeights(parameters(), dtype)
    path, name = file.source["file"], shared.source["shared_memory"]
    try:
        with shared_tensors(name) as views:
            read = {each: tensor.clone() for each, tensor in views}
        for weights in (load_file(path), dict(read_file(path)), read):
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[each], tensor) for each, tensor in expected.items())
            assert {tensor.dtype for tensor in weights.values()} == {dtype}
        assert oct(os.stat(Path(path).parent).st_mode & 0o077) == "0o0"
    finally:
        for written in (file, shared):
            written.discard()
            written.discard()
    assert not Path(path).parent.exists()
    assert not Path("/dev/shm", name).exists()


WRITER = """
import sys, torch
from headwater.weights.file import FileWeights

kept = [FileWeights([("w", torch.zeros(3))], torch.float32) for _ in range(2)]
print(kept[0].source["file"], flush=True)
sys.stdin.readline()
"""


def test_weights_of_a_process_that_was_killed_are_removed_and_those_of_the_living_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    mine = FileWeights(parameters(), torch.float32)
    (tmp_path / "headwater-weights-of-somebody").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        theirs = Path(writer.stdout.readline().strip()).parent
        others = {*theirs.parent.iterdir()} - {Path(mine.source["file"]).parent}
        assert f"-{writer.pid}-" in theirs.name
        assert remove_leftovers() == []
        # As seen from another container, which has no process of that number: the lock still says that it lives.
        with monkeypatch.context() as patch:
            patch.setattr(file, "process_start", lambda pid: None)
            assert remove_leftovers() == []
        writer.kill()
        writer.wait(20)
        removed = set(remove_leftovers())
    assert theirs in removed
    assert removed == others - {tmp_path / "headwater-weights-of-somebody"}
    assert len(removed) == 2
    assert not any(each.exists() for each in removed)
    assert load_file(mine.source["file"])
    mine.discard()


@pytest.mark.parametrize(("kind", "remedy"), [(FileWeights, "TMPDIR"), (SharedWeights, "weight_transfer=file")])
def test_no_room_is_told_with_a_remedy_and_leaves_nothing_behind(kind, remedy, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def remembering(*args: object, **kwargs: object) -> SharedMemory:
        made.append(SharedMemory(*args, **kwargs))
        return made[-1]

    made: list[SharedMemory] = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shared_memory, "SharedMemory", remembering)
    with pytest.raises(WeightsError, match=f"No space left on device.*{remedy}"):
        kind(parameters(), torch.float32)
    assert list(tmp_path.iterdir()) == []
    assert len(made) == (kind is SharedWeights)
    assert not any(Path("/dev/shm", each.name).exists() for each in made)
