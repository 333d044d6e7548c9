"""Weights in the layout of a safetensors file, written straight to where another process reads them.

Each tensor is converted to the engine's number type and copied from its device in one go, into its place: beside the
learner's own weights there is one copy, the one that is read.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headwater.core.errors import WeightsError

NamedTensors = Sequence[tuple[str, Tensor]]

_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class WrittenWeights(Protocol):
    """Weights that another process can read until they are discarded."""

    @property
    def source(self) -> dict[str, str]:
        """What ``/control/update_weights`` is told."""
        ...

    def discard(self) -> None:
        """Nobody will read them any more. Discarding twice is fine."""
        ...


@dataclass(frozen=True)
class Image:
    """Where everything goes: a header, then the tensors one after the other."""

    tensors: NamedTensors
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return len(self._header()) + sum(self._num_bytes(tensor) for _, tensor in self.tensors)

    @torch.no_grad()
    def write(self, buffer: mmap.mmap | memoryview) -> None:
        header = self._header()
        buffer[: len(header)] = header
        place = len(header)
        for _, tensor in self.tensors:
            count = self._num_bytes(tensor)
            if count:
                target = torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=place)
                target.view(self.dtype).view(tensor.shape).copy_(tensor)
            place += count

    def _num_bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * self.dtype.itemsize

    def _header(self) -> bytes:
        entries, place = {}, 0
        for name, tensor in self.tensors:
            end = place + self._num_bytes(tensor)
            kind = _SAFETENSORS_NAMES[self.dtype]
            entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [place, end]}
            place = end
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)  # numbers begin where numbers may
        return len(text).to_bytes(8, "little") + text


def reserve(descriptor: int, size: int, where: str, remedy: str) -> None:
    """Take the room now: writing to memory behind which there is none would end the process without a word."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise WeightsError(
            f"{size / 2**30:.2f} GiB of weights do not fit {where} ({error.strerror}); {remedy}"
        ) from error
