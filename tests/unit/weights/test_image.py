"""Weights written for another process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from headwater.core.errors import WeightsError
from headwater.engine.weight_source import read_file, shared_tensors
from headwater.weights.file import FileWeights
from headwater.weights.shared_memory import SharedWeights


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


@pytest.mark.parametrize(("kind", "remedy"), [(FileWeights, "TMPDIR"), (SharedWeights, "weight_transfer=file")])
def test_no_room_is_told_with_a_remedy_and_leaves_nothing_behind(kind, remedy, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(WeightsError, match=f"No space left on device.*{remedy}"):
        kind(parameters(), torch.float32)
    assert set(os.listdir("/dev/shm")) <= before
