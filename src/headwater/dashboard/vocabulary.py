"""The bytes of a run's tokens, from its ``tokens.parquet``, and the text that they make."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_LONGEST_SPLIT = 3
"""A character has at most four bytes, so at most three tokens before a place can be parts of it."""


@dataclass(frozen=True)
class Spelled:
    """Tokens as text."""

    texts: list[str]
    """What each token completes. Concatenated, they are the whole text."""
    pieces: list[bytes]
    is_split: list[int]
    """Places of tokens that begin or end inside a character."""


class Vocabulary:
    """The table is read when it is first needed. A run without one has no bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._bytes: Any = None
        self._special: Any = None
        self._is_exact = False
        self.problem = ""

    def is_exact(self) -> bool:
        """Whether the text of a response is the concatenation of its tokens' bytes."""
        self._load()
        return self._bytes is not None and self._is_exact

    def pieces(self, tokens: Sequence[int]) -> list[bytes | None]:
        """The bytes of each token; None if they are not known."""
        self._load()
        known = self._bytes
        size = 0 if known is None else len(known)
        return [known[token].as_py() if 0 <= token < size else None for token in tokens]

    def spell(self, tokens: Sequence[int], before: Sequence[int] = ()) -> Spelled:
        """The text of ``tokens``. ``before`` are those in front of them, which may begin a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for piece in self.pieces(before[-_LONGEST_SPLIT:]):
            decoder.decode(piece or b"")
        pieces = self.pieces(tokens)
        texts, split = [], []
        for place, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
            if piece is None:
                # Bytes that were waiting for the rest of their character do not get it.
                texts.append(decoder.decode(b"", True) + f"⟨{token}⟩")
                decoder.reset()
                continue
            texts.append(decoder.decode(piece))
            if not _is_whole(piece):
                split.append(place)
        return Spelled(texts, [piece or b"" for piece in pieces], split)

    def _load(self) -> None:
        with self._lock:
            try:
                found = self._path.stat()
                stamp = (found.st_mtime_ns, found.st_size)
            except OSError:
                self.problem = (
                    "tokens.parquet is missing, so tokens are shown as numbers: an earlier version recorded this run."
                )
                self._stamp, self._bytes = None, None
                return
            if stamp == self._stamp:
                return
            self._stamp, self._bytes, self.problem = stamp, None, ""
            try:
                with pq.ParquetFile(self._path) as file:
                    table = file.read(columns=["bytes"], use_threads=False)
                joined = table["bytes"].combine_chunks()
                if not pa.types.is_binary(joined.type):
                    raise ValueError("its column bytes has another type")
                self._bytes = joined
                self._is_exact = (table.schema.metadata or {}).get(b"is_exact") == b"1"
            except (pa.ArrowException, OSError, ValueError, KeyError) as error:
                reason = " ".join(str(error).split())[:200]
                self.problem = f"tokens.parquet cannot be read, so tokens are shown as numbers ({reason})."


def _is_whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
