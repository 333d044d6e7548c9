"""The bytes that each token adds to a text, for tokenizers whose texts are their tokens' bytes one after the other.

    pieces = pieces_of(tokenizer)              # None for a tokenizer that joins its tokens in some other way
    b"".join(map(pieces.of, tokens))           # holds every text that tokenizer.decode(tokens) shows

Two kinds are known. Byte-level BPE shows bytes that are no character as U+FFFD. SentencePiece with byte fallback shows
a run of single-byte tokens as text if all of it is valid, and else as U+FFFD for each of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from headwater.core.protocols import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet one."""

_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNDERLINE = "\N{LOWER ONE EIGHTH BLOCK}"
_SPACE = {"type": "Replace", "pattern": {"String": _UNDERLINE}, "content": " "}
_FALLBACK = [{"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True, eq=False)
class TokenPieces:
    pieces: list[bytes]
    """By token id; empty where there is no such token."""
    single_bytes: frozenset[int]
    """Tokens that SentencePiece falls back to: how a run of them shows depends on all of it."""

    def of(self, token: int) -> bytes:
        # A model may have more embeddings than there are tokens; decoders skip such ids.
        return self.pieces[token] if token < len(self.pieces) else b""

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.pieces), default=0)

    def text(self, tokens: range) -> str:
        """What decoding shows, but for a space at the beginning, which some decoders strip."""
        if not self.single_bytes:
            return b"".join(map(self.of, tokens)).decode(errors="replace")
        shown = (token for token in tokens if self.of(token))
        runs = groupby(shown, key=self.single_bytes.__contains__)
        return "".join(self._run([*run], is_single) for is_single, run in runs)

    def _run(self, tokens: list[int], is_single: bool) -> str:
        data = b"".join(map(self.of, tokens))
        try:
            return data.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(data) if is_single else data.decode(errors="replace")


def pieces_of(tokenizer: Tokenizer) -> TokenPieces | None:
    """The pieces of a tokenizer's tokens; ``None`` where they do not make up its texts."""
    key: Any = tokenizer  # the contract does not ask for a hash; what has none of its own has that of its identity
    return _known_pieces(key)


@lru_cache(maxsize=4)
def _known_pieces(tokenizer: Any) -> TokenPieces | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    names = {number: name for name, number in backend.get_vocab(with_added_tokens=True).items()}
    pieces = _pieces(decoder, [names.get(number, "") for number in range(max(names, default=-1) + 1)])
    if pieces is None:
        return None
    # A subclass may decode in a way of its own, or tidy spaces up. One look at all tokens in a row shows it.
    everything = range(len(pieces.pieces))
    text, expected = tokenizer.decode([*everything]), pieces.text(everything)
    return pieces if text in (expected, expected.removeprefix(" ")) else None


def _pieces(decoder: Any, names: list[str]) -> TokenPieces | None:
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        byte_of = _byte_level()
        return TokenPieces([_byte_level_piece(name, byte_of) for name in names], frozenset())
    has_space = steps[:1] == [_SPACE]
    if steps[has_space:] not in (_FALLBACK, [*_FALLBACK, _STRIP]):
        return None
    texts = [name.replace(_UNDERLINE, " ") for name in names] if has_space else names
    matches = [_SINGLE_BYTE.fullmatch(text) for text in texts]
    return TokenPieces(
        [bytes([int(match[1], 16)]) if match else text.encode() for text, match in zip(texts, matches, strict=True)],
        frozenset(number for number, match in enumerate(matches) if match),
    )


def _byte_level() -> dict[int, int]:
    """From the character that byte-level vocabularies write for each byte: itself if it prints, else one from 256 on.

    Other characters become one that is no byte, so that encoding says whether there were any.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return dict.fromkeys(others, ord(REPLACEMENT)) | {256 + place: byte for place, byte in enumerate(others)}


def _byte_level_piece(name: str, byte_of: dict[int, int]) -> bytes:
    try:
        return name.translate(byte_of).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()  # an added token, written as it is
