"""Weights for another process, in a file that only this user may read."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from pathlib import Path

import torch

from headwater.weights.image import Image, NamedTensors, reserve


class FileWeights:
    """A folder of its own that holds one version as ``model.safetensors``."""

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype) -> None:
        image = Image(tensors, dtype)
        size = image.size
        self._folder = Path(tempfile.mkdtemp(prefix="headwater-weights-"))
        try:
            with self._path.open("w+b") as file:
                remedy = "free some room, or set TMPDIR to a folder that has it"
                reserve(file.fileno(), size, str(self._folder), remedy)
                with mmap.mmap(file.fileno(), size) as buffer:
                    image.write(buffer)
        except BaseException:
            self.discard()
            raise

    @property
    def _path(self) -> Path:
        return self._folder / "model.safetensors"

    @property
    def source(self) -> dict[str, str]:
        return {"file": str(self._path)}

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
