"""Weights for another process of this machine, in memory that both see."""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import os
from multiprocessing.shared_memory import SharedMemory

import torch

from headwater.weights.image import Image, NamedTensors, reserve


class SharedWeights:
    """A segment that holds one version. Python removes it when this process ends, however it ends."""

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype) -> None:
        image = Image(tensors, dtype)
        size = image.size
        self._segment: SharedMemory | None = SharedMemory(create=True, size=size)
        try:
            descriptor = _posixshmem.shm_open(f"/{self._segment.name}", os.O_RDWR, mode=0o600)
            try:
                remedy = "give /dev/shm more room (docker run --shm-size), or use rollout.weight_transfer=file"
                reserve(descriptor, size, "shared memory", remedy)
            finally:
                os.close(descriptor)
            assert self._segment.buf is not None, "an open segment has its memory"
            image.write(self._segment.buf)
        except BaseException:
            self.discard()
            raise

    @property
    def source(self) -> dict[str, str]:
        assert self._segment is not None, "discarded"
        return {"shared_memory": self._segment.name}

    def discard(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
            segment.unlink()
