"""Finding the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Items

from headwater.core.protocols import Tokenizer

_MARGIN = 4
"""Tokens decoded beyond the length of the longest stop string: characters may be spread over a few."""


def find_stop(tokenizer: Tokenizer, tokens: Items[int], num_checked: int, stops: Items[str]) -> int | None:
    """Number of tokens up to and with the one that completes a stop string, or ``None``.

    Only matches that a token after the first ``num_checked`` completes count. A token is at least one byte, so a window
    as long as the longest stop string in bytes, and a little more, shows every match that a new token can complete.
    """
    window = max(len(stop.encode()) for stop in stops) + _MARGIN
    start = max(0, num_checked - window)
    # A match inside the part that was already looked at does not count: it was seen, and passed over, before. That
    # part may end in half a character.
    num_seen = len(tokenizer.decode(list(tokens[start:num_checked])).rstrip("\ufffd"))
    if not _reaches_beyond(num_seen, tokenizer, tokens[start:], stops):
        return None
    for end in range(num_checked + 1, len(tokens) + 1):
        if _reaches_beyond(num_seen, tokenizer, tokens[start:end], stops):
            return end
    return None


def _reaches_beyond(num_seen: int, tokenizer: Tokenizer, tokens: Items[int], stops: Items[str]) -> bool:
    """Whether a stop string ends after the first ``num_seen`` characters."""
    text = tokenizer.decode(list(tokens))
    return any(text.find(stop, max(0, num_seen - len(stop) + 1)) >= 0 for stop in stops)
