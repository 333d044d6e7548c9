"""Shared by the tests of stop strings: tokenizers, random responses, and where they end by definition."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hypothesis import strategies as st
from tiny import tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

KINDS = ("byte level", "fallback", "fallback that strips")
NO_SUCH_TOKEN = 700

_WORDS = ["▁", "a", "b", "▁a", "ab", "bab", "▁b€", "€", "é▁", "€é", "<s>", "▁▁", "aa"]
_BYTES = [*"€éab ".encode(), 0xFF, 0xE2]


@lru_cache(maxsize=3)
def tokenizer_of(kind: str) -> Any:
    if kind == "byte level":
        return tokenizer()
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    plain = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if kind == "fallback that strips" else []
    plain.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=plain)


@lru_cache(maxsize=2048)
def piece(kind: str, token: int) -> bytes:
    """The bytes of a token, from its name."""
    name = tokenizer_of(kind).convert_ids_to_tokens(token)
    if name is None:
        return b""
    if kind == "byte level":
        of_character = {character: byte for byte, character in bytes_to_unicode().items()}
        return bytes(of_character[each] for each in name)
    return bytes([token]) if token < 256 else name.replace("▁", " ").encode()


def _likely(kind: str) -> list[int]:
    """Tokens that often combine to characters and stop strings."""
    if kind != "byte level":
        return [*_BYTES, *range(256, 256 + len(_WORDS)), NO_SUCH_TOKEN]
    names = tokenizer().get_vocab()
    of_byte = bytes_to_unicode()
    return [*(names[of_byte[byte]] for byte in _BYTES), *tokenizer().encode("ab baba the answer"), NO_SUCH_TOKEN]


@st.composite
def responses(draw: st.DrawFn, kind: str, max_size: int = 40) -> tuple[list[int], tuple[str, ...]]:
    """Tokens, and stop strings that are likely to occur in their text."""
    anything = st.integers(0, 511 if kind == "byte level" else 255 + len(_WORDS))
    likely = st.sampled_from(_likely(kind))
    tokens = draw(st.lists(st.one_of(likely, likely, anything), max_size=max_size))
    text = "".join(draw(st.permutations("ab €é"))) + tokenizer_of(kind).decode(tokens).replace("\ufffd", "")
    start = st.integers(0, len(text) - 1)
    part = st.builds(lambda at, length: text[at : at + length], start, st.integers(1, 7))
    return tokens, tuple(draw(st.lists(part, min_size=1, max_size=3)))


def first_end(kind: str, tokens: list[int], stops: tuple[str, ...]) -> int | None:
    """The smallest number of tokens whose text contains a stop string."""
    ends = range(1, len(tokens) + 1)
    return next((end for end in ends if any(stop in tokenizer_of(kind).decode(tokens[:end]) for stop in stops)), None)


def first_end_after(kind: str, tokens: list[int], num_checked: int, stops: tuple[str, ...]) -> int | None:
    """``first_end``, but only for stop strings that end inside a token after ``num_checked``."""
    for end in range(num_checked + 1, len(tokens) + 1):
        last, text = piece(kind, tokens[end - 1]), tokenizer_of(kind).decode(tokens[:end])
        rests = [last[length:].decode(errors="replace") for length in range(1, len(last) + 1)]
        if any(text.endswith(stop + rest) for stop in stops for rest in rests):
            return end
    return None
