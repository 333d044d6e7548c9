"""A short text that identifies every bit of a model's weights.

    mine = checksum(model.named_parameters(), torch.bfloat16)     # 'bfloat16-3f0c...'
    assert mine == engine.weights_checksum()

    running = Checksum(torch.bfloat16)                            # the same text from a stream
    for bucket in learner.export():
        running.add(bucket)
    assert running.text() == mine

The names, shapes and number types of the tensors and the bits of every number at its position determine the text. The
device, the order of the tensors and their memory layout do not. The checksum detects mistakes; it is not secure against
somebody who searches for two sets of weights with the same checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from headwater.core.errors import WeightsError

_CHUNK_BYTES = 8 * 2**20
"""Bytes processed at a time: small compared with a model, large enough to keep a GPU busy."""
_FOLD = 33
"""How far a word's upper bits are shifted down. 32 or 16 would fold the sign of one number onto the next one's."""


def dtype_name(tensors: Iterable[Tensor]) -> str:
    """The number type of all ``tensors``, for example ``bfloat16``; ``mixed`` if there are several."""
    kinds = {_name(tensor.dtype) for tensor in tensors}
    return kinds.pop() if len(kinds) == 1 else "mixed"


class Checksum:
    """The checksum of tensors that come one bucket at a time. Keeps a few numbers per tensor, on its device."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Count the tensors as they are, or as they would be in ``dtype``."""
        self._dtype = dtype
        self._sums: list[tuple[str, list[Tensor]]] = []
        self._dtypes: set[str] = set()

    @torch.no_grad()
    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            kind = _name(self._dtype or tensor.dtype)
            self._dtypes.add(kind)
            self._sums.append((f"{name} {kind} {tuple(tensor.shape)}", _chunk_sums(tensor.detach(), self._dtype)))

    def text(self) -> str:
        """The number type and a hash of all tensors so far."""
        digest = hashlib.blake2b(digest_size=16)
        # The device is waited for only here, when all its work is queued.
        for header, chunks in sorted(self._sums, key=lambda each: each[0]):
            digest.update(f"{header}\n".encode())
            for value in torch.stack(chunks).tolist() if chunks else ():
                digest.update(value.to_bytes(8, "little", signed=True))
        return f"{next(iter(self._dtypes)) if len(self._dtypes) == 1 else 'mixed'}-{digest.hexdigest()}"


def checksum(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """The number type and a hash of ``tensors``, as they are or as they would be in ``dtype``."""
    running = Checksum(dtype)
    running.add(tensors)
    return running.text()


def dtype_of_checksum(text: str) -> torch.dtype:
    """The number type of the weights that ``text`` identifies."""
    dtype = getattr(torch, text.partition("-")[0], None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"checksum {text}: the weights are not of a single number type; load the model in one type")
    return dtype


def _chunk_sums(tensor: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """One number per chunk, on the tensor's device.

    A chunk is read as 64-bit words, and each word is multiplied by an odd number that depends on its position. Before
    that, the upper bits of a word are folded onto its lower bits: otherwise a change of the highest bit would have the
    same effect at every position, and two such changes would cancel out. Integer arithmetic wraps around in the same
    way on every device, and an integer sum does not depend on the order of its terms.
    """
    flat = tensor.reshape(-1)
    num_elements = _CHUNK_BYTES // (dtype or flat.dtype).itemsize
    sums = []
    for start in range(0, len(flat), num_elements):
        words = _words(flat[start : start + num_elements].to(dtype or flat.dtype))
        folded = words >> _FOLD
        folded &= 2 ** (64 - _FOLD) - 1  # the sign was shifted in
        folded ^= words
        folded *= _multipliers(flat.device)[: len(words)]
        sums.append(folded.sum())
    return sums


def _words(chunk: Tensor) -> Tensor:
    """The chunk's bits as 64-bit integers, padded with zeros."""
    num_bytes = len(chunk) * chunk.element_size()
    if num_bytes % 8 or chunk.storage_offset() * chunk.element_size() % 8:
        padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=chunk.device)
        padded[:num_bytes] = chunk.view(torch.uint8)
        return padded.view(torch.int64)
    return chunk.view(torch.int64)


@lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """A pseudo-random odd number for each position in a chunk (the finaliser of SplitMix64)."""
    values = torch.arange(1, _CHUNK_BYTES // 8 + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values ^= (values >> shift) & (2 ** (64 - shift) - 1)
        values *= factor
    values ^= (values >> 31) & (2**33 - 1)
    return values | 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
