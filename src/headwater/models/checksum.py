"""A short text that stands for every bit of a model's weights.

    mine = checksum(learner.export_weights(), torch.bfloat16)     # 'bfloat16-3f0c...'
    assert mine == engine.weights_checksum()

Names, shapes, number types and the bits of every number at its place decide it; the device, the order in which tensors
come and how they lie in memory do not. It tells a mistake from no mistake; it does not withstand somebody who looks for
two sets of weights with one checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from headwater.core.errors import WeightsError

_CHUNK_BYTES = 8 * 2**20
"""Worked on at a time: small beside any model, large enough that a GPU is busy."""
_FOLD = 33
"""How far a word's upper bits are moved down. Not 32 and not 16: the sign of one number would meet the next one's."""


@torch.no_grad()
def checksum(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """The number type and a hash of ``tensors``, as they are or as they would be in ``dtype``."""
    sums: list[tuple[str, list[Tensor]]] = []
    dtypes: set[str] = set()
    for name, tensor in tensors:
        kind = _name(dtype or tensor.dtype)
        dtypes.add(kind)
        sums.append((f"{name} {kind} {tuple(tensor.shape)}", _chunk_sums(tensor.detach(), dtype)))
    digest = hashlib.blake2b(digest_size=16)
    # The device is waited for only now, when all its work is queued.
    for header, chunks in sorted(sums, key=lambda each: each[0]):
        digest.update(f"{header}\n".encode())
        for value in torch.stack(chunks).tolist() if chunks else ():
            digest.update(value.to_bytes(8, "little", signed=True))
    return f"{dtypes.pop() if len(dtypes) == 1 else 'mixed'}-{digest.hexdigest()}"


def dtype_of_checksum(text: str) -> torch.dtype:
    """The number type of the weights that ``text`` stands for."""
    dtype = getattr(torch, text.partition("-")[0], None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"checksum {text}: is not of weights of one number type; load the model in one")
    return dtype


def _chunk_sums(tensor: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """One number per chunk, on the tensor's device.

    A chunk is read as 64-bit words, each multiplied by an odd number that goes with its place. Before that the words'
    upper bits are folded onto the lower ones: a change of the highest bit alone would be the same whatever it is
    multiplied by, and two of them would cancel out. Integers wrap around alike on every device, and their sum does not
    depend on the order it is made in.
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
    """The chunk's bits as 64-bit integers, with zeros behind the last one."""
    num_bytes = len(chunk) * chunk.element_size()
    if num_bytes % 8 or chunk.storage_offset() * chunk.element_size() % 8:
        padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=chunk.device)
        padded[:num_bytes] = chunk.view(torch.uint8)
        return padded.view(torch.int64)
    return chunk.view(torch.int64)


@lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """An odd number for each place in a chunk, without a pattern (the finaliser of SplitMix64)."""
    values = torch.arange(1, _CHUNK_BYTES // 8 + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values ^= (values >> shift) & (2 ** (64 - shift) - 1)
        values *= factor
    values ^= (values >> 31) & (2**33 - 1)
    return values | 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
