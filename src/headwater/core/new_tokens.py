"""New tokens of many requests together, and their binary form for another process.

    frame = NewTokens(numbers, counts, tokens, ended).encode()      # once per round of the engine
    for number, its_tokens in NewTokens.decode(frame).rows(): ...

A frame consists of little-endian numbers without gaps:

| bytes | contents |
|---|---|
| 24 | ``HWNT``; the version of this format; 0; the number of rows, of tokens and of ended requests; 0 |
| 8 per row | the request's number |
| 8 per end | the number of a request that has ended |
| 12 per token | the tokens of all rows: token id, log-prob and policy version |
| 4 per row | how many of the tokens belong to the row |
| 1 per end | the index of the stop reason in ``STOP_REASONS`` |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from headwater.core.requests import Delta, StopReason

TOKEN = np.dtype([("token", "<i4"), ("logprob", "<f4"), ("version", "<i4")])
"""One token in memory and in a frame. Engines compute log-probs in 32 bits, so nothing is lost."""
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)

_MAGIC = b"HWNT"
_VERSION = 1
_HEADER = struct.Struct("<4sHHIIII")
_NUM_BYTES_SHOWN = 16


class BadFrame(ValueError):
    """Bytes that are not a frame of this version."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What was generated for some requests since the last time. A request may have several rows."""

    numbers: NDArray[np.int64]
    """Per row, the number that the caller has given to the request."""
    counts: NDArray[np.int32]
    """Per row, how many tokens are new."""
    tokens: NDArray[np.void]
    """The tokens of all rows one after the other, as ``TOKEN``."""
    ended: Sequence[tuple[int, StopReason]] = ()
    """Requests that have ended. Their last tokens are in this record or came earlier."""

    @classmethod
    def of_delta(cls, number: int, delta: Delta) -> NewTokens:
        """The new tokens of one stream."""
        tokens = np.empty(len(delta.tokens), TOKEN)
        tokens["token"], tokens["logprob"], tokens["version"] = delta.tokens, delta.logprobs, delta.versions
        return cls(np.array([number], np.int64), np.array([len(tokens)], np.int32), tokens)

    @classmethod
    def join(cls, parts: Sequence[NewTokens], ended: Iterable[tuple[int, StopReason]] = ()) -> NewTokens:
        """Everything in ``parts``, in order, and further ends."""
        ends = [*(each for part in parts for each in part.ended), *ended]
        if len(parts) == 1:
            return cls(parts[0].numbers, parts[0].counts, parts[0].tokens, ends)
        return cls(
            np.concatenate([np.zeros(0, np.int64), *(part.numbers for part in parts)]),
            np.concatenate([np.zeros(0, np.int32), *(part.counts for part in parts)]),
            np.concatenate([np.zeros(0, TOKEN), *(part.tokens for part in parts)]),
            ends,
        )

    def rows(self) -> Iterator[tuple[int, memoryview]]:
        """Each row: its number, and the bytes of its tokens."""
        data = memoryview(self.tokens.tobytes())
        start = 0
        for number, end in zip(self.numbers.tolist(), (np.cumsum(self.counts) * TOKEN.itemsize).tolist(), strict=True):
            yield number, data[start:end]
            start = end

    def encode(self) -> bytes:
        codes = bytes(STOP_REASONS.index(reason) for _, reason in self.ended)
        sizes = len(self.numbers), len(self.tokens), len(codes)
        return b"".join(
            (
                _HEADER.pack(_MAGIC, _VERSION, 0, *sizes, 0),
                self.numbers.astype("<i8", copy=False).tobytes(),
                np.array([number for number, _ in self.ended], "<i8").tobytes(),
                self.tokens.tobytes(),
                self.counts.astype("<i4", copy=False).tobytes(),
                codes,
            )
        )

    @classmethod
    def decode(cls, frame: bytes) -> NewTokens:
        """Read a frame without copying its tokens. Raises ``BadFrame`` for anything else."""
        if len(frame) < _HEADER.size or frame[: len(_MAGIC)] != _MAGIC:
            raise BadFrame(f"not a frame of new tokens: {len(frame)} bytes, {frame[:_NUM_BYTES_SHOWN]!r}")
        _, version, _, num_rows, num_tokens, num_ends, _ = _HEADER.unpack_from(frame)
        if version != _VERSION:
            raise BadFrame(f"a frame of format version {version}, not {_VERSION}; use the same release on both sides")
        size = _HEADER.size + num_rows * 12 + num_tokens * TOKEN.itemsize + num_ends * 9
        if len(frame) != size:
            raise BadFrame(f"a frame of {len(frame)} bytes that should have {size}")
        place = _HEADER.size

        def take(dtype: np.dtype[Any], count: int) -> NDArray[Any]:
            nonlocal place
            start, place = place, place + count * dtype.itemsize
            return np.frombuffer(frame, dtype, count, start)

        numbers, ended = take(np.dtype("<i8"), num_rows), take(np.dtype("<i8"), num_ends)
        tokens, counts = take(TOKEN, num_tokens), take(np.dtype("<i4"), num_rows)
        codes = take(np.dtype("u1"), num_ends)
        if (counts < 0).any() or int(counts.sum(dtype=np.int64)) != num_tokens:
            raise BadFrame(f"a frame whose {num_rows} rows do not hold {num_tokens} tokens")
        if (codes >= len(STOP_REASONS)).any():
            raise BadFrame(f"a frame with the stop reason {codes.max()}; there are {len(STOP_REASONS)}")
        reasons = (STOP_REASONS[code] for code in codes.tolist())
        return cls(numbers, counts, tokens, tuple(zip(ended.tolist(), reasons, strict=True)))
