"""Finding the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence as Items

from headwater.core.protocols import Tokenizer

_MARGIN = 4
"""Tokens decoded beyond the length of the longest stop string: characters may be spread over a few."""


def find_stop(tokenizer: Tokenizer, tokens: Items[int], num_checked: int, stops: Items[str]) -> int | None:
    """Number of tokens up to and with the one that completes a stop string, or ``None``.

    The first ``num_checked`` tokens are known to hold none. A token is at least one byte, so a window as long as the
    longest stop string in bytes, and a little more, shows every match that a new token can complete.
    """
    window = max(len(stop.encode()) for stop in stops) + _MARGIN
    start = max(0, num_checked - window)
    if not _holds(tokenizer, tokens[start:], stops):
        return None
    for end in range(num_checked + 1, len(tokens) + 1):
        if _holds(tokenizer, tokens[start:end], stops):
            return end
    return None


def _holds(tokenizer: Tokenizer, tokens: Items[int], stops: Items[str]) -> bool:
    text = tokenizer.decode(list(tokens))
    return any(stop in text for stop in stops)
