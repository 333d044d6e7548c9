"""Files of weights that are written one tensor at a time."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from headwater.core.errors import ModelError
from headwater.models.save import write_safetensors

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
SHAPES = {name: tuple(each.shape) for name, each in TENSORS.items()}
DTYPES = {name: each.dtype for name, each in TENSORS.items()}


def test_a_file_is_whole_or_refused(tmp_path):
    write_safetensors(tmp_path / "whole", SHAPES, DTYPES, iter(TENSORS.items()))
    read = load_file(tmp_path / "whole")
    assert all(torch.equal(read[name], each) for name, each in TENSORS.items())
    with pytest.raises(ModelError, match="expected b"):
        write_safetensors(tmp_path / "short", SHAPES, DTYPES, iter([("a", TENSORS["a"])]))
