"""Weights as the difference from the version before, compressed: for slow links. Exact after decoding.

An update of reinforcement learning changes few bits of most weights, in bfloat16 often none. The bytes of a bucket are
combined with those of the same bucket in the version before (exclusive or), sorted so that the first bytes of all
numbers come first, then the second ones, and compressed with zlib. Both ends keep the bytes of the version before, in
main memory.

    message = writer.encode(bucket_number, data, 2)        # uint8 tensors, of numbers of 2 bytes
    reader.decode(bucket_number, message, into, 2)         # into now has the bytes of data
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.core.errors import WeightsError

_LEVEL = 1
"""The fastest: the zeros of an unchanged byte compress well at every level."""
_RUN = 4096
"""Bytes that are compressed, or left out as unchanged, together."""


class DeltaWriter:
    """The sender's end. Its first message of every bucket is the difference from zero."""

    def __init__(self) -> None:
        self._previous: dict[Hashable, NDArray[np.uint8]] = {}
        self.num_bytes = 0
        """The size of the last message."""

    def encode(self, key: Hashable, data: Tensor, itemsize: int) -> Tensor:
        new = data.cpu().numpy()
        old = self._previous.get(key)
        planes = _planes(new if old is None or len(old) != len(new) else new ^ old, itemsize)
        self._previous[key] = new.copy()
        # Whole runs of zeros are left out before zlib sees them: finding them is many times faster.
        padded = np.zeros(-(-len(planes) // _RUN) * _RUN, np.uint8)
        padded[: len(planes)] = planes
        runs = padded.reshape(-1, _RUN)
        changed = runs.any(axis=1)
        packed = np.packbits(changed).tobytes() + zlib.compress(runs[changed].tobytes(), _LEVEL)
        self.num_bytes = len(packed)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


class DeltaReader:
    """The receiver's end. It must be given every message of its writer."""

    def __init__(self) -> None:
        self._previous: dict[Hashable, NDArray[np.uint8]] = {}

    def decode(self, key: Hashable, message: Tensor, into: Tensor, itemsize: int) -> None:
        """Write the bytes of the new version into ``into``, whose size is known."""
        packed, size = message.numpy(), into.numel()
        num_runs = -(-size // _RUN)
        num_flags = -(-num_runs // 8)
        changed = np.unpackbits(packed[:num_flags], count=num_runs).astype(bool)
        try:
            values = np.frombuffer(zlib.decompress(packed[num_flags:].tobytes()), np.uint8).reshape(-1, _RUN)
            runs = np.zeros((num_runs, _RUN), np.uint8)
            runs[changed] = values
        except (zlib.error, ValueError) as error:
            raise WeightsError(f"weights: the difference of bucket {key} cannot be decoded ({error})") from error
        difference = _numbers(runs.reshape(-1)[:size], itemsize)
        old = self._previous.get(key)
        if old is not None and len(old) == size:
            difference ^= old
        self._previous[key] = difference
        into.copy_(torch.from_numpy(difference))


def _planes(data: NDArray[np.uint8], itemsize: int) -> NDArray[np.uint8]:
    """The first bytes of all numbers, then the second ones, and so on: unchanged bytes come together."""
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1)


def _numbers(planes: NDArray[np.uint8], itemsize: int) -> NDArray[np.uint8]:
    """The inverse of ``_planes``."""
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).reshape(-1)
