"""The text of a result as the model reads it: in a limited number of tokens, and without control tokens."""

from __future__ import annotations

import re
from typing import Literal

from headwater.chat.render import special_tokens
from headwater.core.protocols import Tokenizer

Side = Literal["left", "right", "middle"]

_CHARACTERS_PER_TOKEN = 8
"""How much text is encoded at first for each token that is kept, so that megabytes are never encoded as a whole."""


class ResultText:
    """Makes the texts of results. One object serves all tools of a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = sorted((name for name in special_tokens(tokenizer) if len(name) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names))) if names else None

    def without_control_tokens(self, text: str) -> str:
        """``text`` in which a token such as ``<|im_end|>`` is ordinary text, with a space after its first character.

        Otherwise a document or the output of a program could end the tool's message, and continue as another role.
        """
        return self._control.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text) if self._control else text

    def truncated(self, text: str, max_tokens: int, side: Side) -> str:
        return truncate(text, max_tokens, side, self._tokenizer)


def truncate(text: str, max_tokens: int, side: Side, tokenizer: Tokenizer) -> str:
    """``text`` in at most ``max_tokens`` tokens, with a note where something was removed.

    ``left`` removes the beginning, ``right`` the end, ``middle`` keeps both ends. If there is no room for the note,
    the text is cut without one.
    """
    window = max_tokens * _CHARACTERS_PER_TOKEN
    if len(text) <= window and _count(text, tokenizer) <= max_tokens:
        return text
    if len(text) > window and _fits(text, max_tokens, window, tokenizer):
        return text
    # The number of removed characters is not known yet; the note may only become shorter.
    room = max_tokens - _count(_note(len(text)), tokenizer)
    while room >= 2:
        cut = _cut(text, room, side, tokenizer)
        excess = _count(cut, tokenizer) - max_tokens
        if excess <= 0:
            return cut
        room -= max(1, excess)  # tokens merge or split differently beside the note
    return _end(text, max_tokens, tokenizer) if side == "left" else _beginning(text, max_tokens, tokenizer)


def _cut(text: str, room: int, side: Side, tokenizer: Tokenizer) -> str:
    head = "" if side == "left" else _beginning(text, room if side == "right" else (room + 1) // 2, tokenizer)
    tail = "" if side == "right" else _end(text[len(head) :], room if side == "left" else room // 2, tokenizer)
    return f"{head}{_note(len(text) - len(head) - len(tail))}{tail}"


def _note(num_characters: int) -> str:
    return f"\n[... {num_characters} characters removed ...]\n"


def _fits(text: str, max_tokens: int, window: int, tokenizer: Tokenizer) -> bool:
    """Whether a text longer than ``window`` fits, because its tokens are unusually long."""
    while window < len(text):
        if _count(text[:window], tokenizer) > max_tokens:
            return False
        window *= 2
    return _count(text, tokenizer) <= max_tokens


def _beginning(text: str, max_tokens: int, tokenizer: Tokenizer) -> str:
    return text[: _length(text, max_tokens, tokenizer, from_end=False)]


def _end(text: str, max_tokens: int, tokenizer: Tokenizer) -> str:
    length = _length(text, max_tokens, tokenizer, from_end=True)
    return text[len(text) - length :]


def _length(text: str, max_tokens: int, tokenizer: Tokenizer, *, from_end: bool) -> int:
    """How many characters of one end fit. The cut is always between characters of the text itself."""
    if max_tokens < 1:
        return 0
    window = min(len(text), max_tokens * _CHARACTERS_PER_TOKEN)
    while True:
        part = text[len(text) - window :] if from_end else text[:window]
        tokens = _encode(part, tokenizer)
        if len(tokens) > max_tokens or window == len(text):
            break
        window = min(len(text), window * 2)
    if len(tokens) <= max_tokens:
        return window
    kept = tokens[-max_tokens:] if from_end else tokens[:max_tokens]
    length = min(window, len(tokenizer.decode(kept, skip_special_tokens=False)))
    while length > 0:
        part = text[len(text) - length :] if from_end else text[:length]
        excess = _count(part, tokenizer) - max_tokens
        if excess <= 0:
            return length
        length -= max(1, excess)
    return 0


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _count(text: str, tokenizer: Tokenizer) -> int:
    return len(_encode(text, tokenizer))
