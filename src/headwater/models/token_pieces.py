"""The bytes of every token of a tokenizer, whose concatenation is the text of a response."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from headwater.core.protocols import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders return for bytes that are not, or not yet, a character."""
_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNDERLINE = "\N{LOWER ONE EIGHTH BLOCK}"
_SPACE = {"type": "Replace", "pattern": {"String": _UNDERLINE}, "content": " "}
_FALLBACK = [{"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True, eq=False)
class TokenPieces:
    """The bytes of every token, for tokenizers whose decoded text is the concatenation of their tokens' bytes.

        pieces = pieces_of(tokenizer)              # None for a tokenizer that joins its tokens in another way
        b"".join(map(pieces.of, tokens))           # contains every text that tokenizer.decode(tokens) returns

    Two kinds are supported. Byte-level BPE decodes invalid bytes as U+FFFD. SentencePiece with byte fallback decodes a
    run of single-byte tokens as text if the whole run is valid UTF-8, and otherwise as one U+FFFD per token.
    """

    pieces: list[bytes]
    """By token id; empty if there is no such token."""
    single_bytes: frozenset[int]
    """SentencePiece's byte-fallback tokens. How a run of them decodes depends on the whole run."""

    def of(self, token: int) -> bytes:
        # A model may have more embeddings than the tokenizer has tokens. Decoders skip such ids.
        return self.pieces[token] if token < len(self.pieces) else b""

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.pieces), default=0)

    def text(self, tokens: range) -> str:
        """The decoded text, except for a leading space, which some decoders strip."""
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
    """The pieces of a tokenizer's tokens; ``None`` if its text is not their concatenation."""
    key: Any = tokenizer  # the protocol does not require a hash, but every object has one by default
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
    # A subclass may decode differently or clean up spaces. Decoding all tokens in a row reveals that.
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
    """Maps the characters of byte-level vocabularies to bytes. A byte that does not print has a character above 255.

    Other characters map to one that is not a byte, so that encoding fails if any is present.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return dict.fromkeys(others, ord(REPLACEMENT)) | {256 + place: byte for place, byte in enumerate(others)}


def _byte_level_piece(name: str, byte_of: dict[int, int]) -> bytes:
    try:
        return name.translate(byte_of).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()  # an added token, stored as plain text
