"""A short text that identifies every bit of a model's weights.

    mine = checksum(model.named_parameters(), torch.bfloat16)     # 'bfloat16-3f0c...'
    assert mine == engine.weights_checksum()

    running = Checksum(torch.bfloat16)                            # the same text from a stream
    for bucket in learner.export():
        running.add(bucket)
    assert running.text() == mine

The names, shapes and number types of the tensors and the bits of every number at its position determine the text. The
device, the order of the tensors and their memory layout do not. The checksum detects mistakes; it is not secure against
an attacker who searches for two sets of weights with the same checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.core.errors import WeightsError

_CHUNK_BYTES = 8 * 2**20
"""Bytes processed at a time: small compared with a model, large enough to keep a GPU busy."""
_BATCH_BYTES = 8 * _CHUNK_BYTES
"""Bytes of many tensors that a GPU counts together. Four times this is allocated meanwhile."""
_FOLD = 33
"""How far a word's upper bits are shifted down. 32 or 16 would fold the sign of one number onto the next one's."""


def dtype_name(tensors: Iterable[Tensor]) -> str:
    """The number type of all ``tensors``, for example ``bfloat16``; ``mixed`` if there are several."""
    kinds = {_name(tensor.dtype) for tensor in tensors}
    return kinds.pop() if len(kinds) == 1 else "mixed"


Sums = dict[str, dict[int, int]]
"""What a checksum is computed from: by tensor (name, number type and shape), the sum of each chunk by its number."""

PART_BYTES = 8
"""A part of a tensor that is added alone must start at a multiple of this, and end at one or at the tensor's end."""


class _Counted(NamedTuple):
    """The sums of chunks in a row. Those of many tensors are one tensor: each view of it would take time."""

    chunk: int
    """The number of the first one."""
    sums: Tensor
    start: int = 0
    num_chunks: int = 1


class Checksum:
    """The checksum of tensors that come one bucket at a time. Keeps a few numbers per tensor, on its device.

    Ranks that hold parts of tensors add their parts with ``add_part``, and the sums of all ranks are merged:

        whole = Checksum.merged([sums_of_rank_0, sums_of_rank_1]).text()
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Count the tensors as they are, or as they would be in ``dtype``."""
        self._dtype = dtype
        self._sums: dict[str, list[_Counted]] = {}
        """By tensor."""

    @classmethod
    def merged(cls, parts: Iterable[Mapping[str, Mapping[int, int]]]) -> Checksum:
        """The checksum of all tensors whose parts have these sums."""
        whole = cls()
        for sums in parts:
            for header, chunks in sums.items():
                values = [_Counted(chunk, torch.tensor(value)) for chunk, value in chunks.items()]
                whole._sums.setdefault(header, []).extend(values)
        return whole

    def add(self, tensors: Iterable[tuple[str, Tensor]], same: Checksum | None = None) -> None:
        """``same`` has counted these tensors in their own number type, which need not be computed again."""
        together: list[tuple[str, Tensor]] = []
        for name, tensor in tensors:
            header = self._header(name, tensor.dtype, tuple(tensor.shape))
            if same is not None and header in same._sums:
                self._sums[header] = same._sums[header]
            elif tensor.device.type == "cuda":
                together.append((header, tensor))
            else:
                self.add_part(name, tuple(tensor.shape), 0, tensor)
        self.add_together(together)

    @torch.no_grad()
    def add_together(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Count whole tensors, by their headers, with a few kernels for many of them: launching takes most of the time
        of small tensors on a GPU."""
        batch: list[_Piece] = []
        num_bytes = 0
        for header, tensor in tensors:
            self._sums.setdefault(header, [])
            for piece in _pieces(header, tensor, self._dtype or tensor.dtype):
                if batch and (num_bytes + piece.num_bytes > _BATCH_BYTES or batch[-1].dtype != piece.dtype):
                    self._count(batch)
                    batch, num_bytes = [], 0
                batch.append(piece)
                num_bytes += piece.num_bytes
        if batch:
            self._count(batch)

    def _count(self, batch: list[_Piece]) -> None:
        sums, start = _batch_sums(batch), 0
        for piece in batch:
            self._sums[piece.header].append(_Counted(piece.chunk, sums, start, len(piece.words)))
            start += len(piece.words)

    @torch.no_grad()
    def add_part(self, name: str, shape: tuple[int, ...], start: int, part: Tensor) -> None:
        """Count the elements of a tensor from number ``start``, in the order of memory. See ``PART_BYTES``."""
        sums = self._sums.setdefault(self._header(name, part.dtype, shape), [])
        sums.extend(_Counted(chunk, total) for chunk, total in _chunk_sums(part.detach(), self._dtype, start))

    def sums(self) -> Sums:
        """The numbers so far. A device is waited for only here, once, when all its work is queued.

        One wait for each tensor would take seconds on a GPU on which other processes generate, because each of them
        would wait for its turn.
        """
        counted = {id(part.sums): part.sums for parts in self._sums.values() for part in parts}
        numbers = dict(zip(counted, _read(list(counted.values())), strict=True))
        sums: Sums = {header: {} for header in self._sums}
        for header, parts in self._sums.items():
            for part in parts:
                values = numbers[id(part.sums)][part.start : part.start + part.num_chunks]
                for chunk, value in enumerate(values, start=part.chunk):
                    # Parts of one chunk are added as the words within a part are: modulo 2**64.
                    sums[header][chunk] = (sums[header].get(chunk, 0) + value + 2**63) % 2**64 - 2**63
        return sums

    def text(self) -> str:
        """The number type and a hash of all tensors so far."""
        digest = hashlib.blake2b(digest_size=16)
        for header, chunks in sorted(self.sums().items()):
            digest.update(f"{header}\n".encode())
            for _, value in sorted(chunks.items()):
                digest.update(value.to_bytes(8, "little", signed=True))
        dtypes = {header.rsplit(" (", 1)[0].rsplit(" ", 1)[-1] for header in self._sums}
        return f"{next(iter(dtypes)) if len(dtypes) == 1 else 'mixed'}-{digest.hexdigest()}"

    def _header(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        return f"{name} {_name(self._dtype or dtype)} {shape}"


def _read(sums: list[Tensor]) -> list[list[int]]:
    """The values of integers that may be on several devices, with one copy from each."""
    places: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        places.setdefault(each.device, []).append(place)
    values: list[list[int]] = [[] for _ in sums]
    for here in places.values():
        numbers, start = torch.cat([sums[place].reshape(-1) for place in here]).tolist(), 0
        for place in here:
            values[place] = numbers[start : start + sums[place].numel()]
            start += len(values[place])
    return values


@dataclass(frozen=True)
class _Piece:
    """Whole chunks of one tensor."""

    header: str
    chunk: int
    """The number of the first one."""
    values: Tensor
    dtype: torch.dtype
    """In which they are counted."""
    words: list[int]
    """The 64-bit words of each chunk."""

    @property
    def num_bytes(self) -> int:
        return PART_BYTES * sum(self.words)


def _pieces(header: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[_Piece]:
    """A tensor in pieces of at most ``_BATCH_BYTES``."""
    flat = tensor.reshape(-1)
    of_chunk, of_piece = _CHUNK_BYTES // dtype.itemsize, _BATCH_BYTES // dtype.itemsize
    for start in range(0, len(flat), of_piece):
        values = flat[start : start + of_piece] if len(flat) > of_piece else flat
        lengths = [min(of_chunk, len(values) - first) for first in range(0, len(values), of_chunk)]
        words = [-(-length * dtype.itemsize // PART_BYTES) for length in lengths]
        yield _Piece(header, start // of_chunk, values, dtype, words)


def _batch_sums(batch: list[_Piece]) -> Tensor:
    """The sum of every chunk of every piece, as ``_chunk_sums`` computes it."""
    dtype, device = batch[0].dtype, batch[0].values.device
    lengths = [length for piece in batch for length in piece.words]
    words = torch.zeros(sum(lengths), dtype=torch.int64, device=device)  # the last word of a piece may have zeros
    room = torch.split(words.view(dtype), [piece.num_bytes // dtype.itemsize for piece in batch])
    pairs = [(each, len(each), len(piece.values)) for each, piece in zip(room, batch, strict=True)]
    targets = [each if size == wanted else each[:wanted] for each, size, wanted in pairs]
    torch._foreach_copy_(targets, [piece.values for piece in batch])
    folded = words >> _FOLD
    folded &= 2 ** (64 - _FOLD) - 1  # the sign was shifted in
    folded ^= words
    folded *= torch.cat([_first_multipliers(device, length) for length in lengths], out=words)
    # Sums of parts as differences of running sums, which are exact because integers wrap around.
    ends = torch.tensor(lengths).cumsum(0).sub_(1).to(device, non_blocking=True)
    totals = torch.cumsum(folded, 0, out=words)[ends]
    return torch.diff(totals, prepend=totals.new_zeros(1))


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


def _chunk_sums(tensor: Tensor, dtype: torch.dtype | None, first: int = 0) -> list[tuple[int, Tensor]]:
    """The number of each chunk and its sum, on the tensor's device. ``tensor`` begins at element ``first`` of a whole.

    A chunk is read as 64-bit words, and each word is multiplied by an odd number that depends on its position. Before
    that, the upper bits of a word are folded onto its lower bits: otherwise a change of the highest bit would have the
    same effect at every position, and two such changes would cancel out. Integer arithmetic wraps around in the same
    way on every device, and an integer sum does not depend on the order of its terms.
    """
    flat = tensor.reshape(-1)
    itemsize = (dtype or flat.dtype).itemsize
    num_elements = _CHUNK_BYTES // itemsize
    sums = []
    end = first + len(flat)
    for chunk in range(first // num_elements, -(-end // num_elements)):
        start, stop = max(first, chunk * num_elements), min(end, (chunk + 1) * num_elements)
        words = _words(flat[start - first : stop - first].to(dtype or flat.dtype))
        folded = words >> _FOLD
        folded &= 2 ** (64 - _FOLD) - 1  # the sign was shifted in
        folded ^= words
        position = (start - chunk * num_elements) * itemsize // PART_BYTES
        folded *= _multipliers(flat.device)[position : position + len(words)]
        sums.append((chunk, folded.sum()))
    return sums


def _words(chunk: Tensor) -> Tensor:
    """The chunk's bits as 64-bit integers, padded with zeros."""
    num_bytes = len(chunk) * chunk.element_size()
    if num_bytes % 8 or chunk.storage_offset() * chunk.element_size() % 8:
        padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=chunk.device)
        padded[:num_bytes] = chunk.view(torch.uint8)
        return padded.view(torch.int64)
    return chunk.view(torch.int64)


@lru_cache(maxsize=4096)
def _first_multipliers(device: torch.device, count: int) -> Tensor:
    """A view. Tensors have the same few sizes in every update, and making a view takes longer than finding it."""
    return _multipliers(device)[:count]


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
