"""Finding the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from headwater.core.protocols import Tokenizer
from headwater.engine.token_pieces import REPLACEMENT, TokenPieces, pieces_of

_MARGIN = 4
"""Tokens decoded beyond the length of the longest stop string: characters may be spread over a few."""


def find_stop(tokenizer: Tokenizer, tokens: Items[int], num_checked: int, stops: Items[str]) -> int | None:
    """Number of tokens up to and with the one that completes a stop string, or ``None``.

    Only matches that a token after the first ``num_checked`` completes count.
    """
    pieces = pieces_of(tokenizer)
    if pieces is None or not are_bytes(stops):
        return _find_in_text(tokenizer, tokens, num_checked, stops)
    wanted = [stop.encode() for stop in stops]
    start = _start_of_window(pieces, tokens, num_checked, max(map(len, wanted)))
    for end, shown in _matches(pieces, tokens, start, num_checked, wanted):
        # The bytes are there; whether the decoder shows them depends on the single-byte tokens around them, and on
        # whether it strips the first space.
        if tokenizer.decode(list(tokens[_start_of_run(pieces, tokens, start) : end])).endswith(shown):
            return end
    return None


def are_bytes(stops: Items[str]) -> bool:
    """Whether stop strings are in a text only where their bytes are in those of its tokens."""
    return not any(REPLACEMENT in stop for stop in stops)


def _start_of_window(pieces: TokenPieces, tokens: Items[int], num_checked: int, num_bytes: int) -> int:
    """Where so many bytes before ``num_checked`` begin: one more than a match that ends behind it can reach back."""
    start, num_left = num_checked, num_bytes
    while start and num_left > 0:
        start -= 1
        num_left -= len(pieces.of(tokens[start]))
    return start


def _start_of_run(pieces: TokenPieces, tokens: Items[int], start: int) -> int:
    """Where decoding must begin for single-byte tokens at ``start`` to show as they do in the whole text."""
    while start and (tokens[start - 1] in pieces.single_bytes or not pieces.of(tokens[start - 1])):
        start -= 1
    return start


def _matches(
    pieces: TokenPieces, tokens: Items[int], start: int, num_checked: int, wanted: Items[bytes]
) -> Iterator[tuple[int, str]]:
    """Where the bytes of a stop string end in a token after ``num_checked``, in order: the number of tokens, and what
    the text up to there ends in.
    """
    parts = [pieces.of(token) for token in tokens[start:]]
    data = b"".join(parts)
    num_seen = sum(map(len, parts[: num_checked - start]))
    if not any(data.find(stop, max(0, num_seen - len(stop) + 1)) >= 0 for stop in wanted):
        return
    end_of_data = num_seen
    for end in range(num_checked + 1, len(tokens) + 1):
        start_of_token, end_of_data = end_of_data, end_of_data + len(parts[end - 1 - start])
        for stop in wanted:
            place = data.find(stop, max(0, start_of_token - len(stop) + 1), end_of_data)
            while place >= 0:
                rest = data[place + len(stop) : end_of_data]
                yield end, (stop + rest).decode(errors="replace")
                place = data.find(stop, place + 1, end_of_data)


def _find_in_text(tokenizer: Tokenizer, tokens: Items[int], num_checked: int, stops: Items[str]) -> int | None:
    """The same for any tokenizer, by decoding. A token is taken to be at least one byte, so that a window as long as
    the longest stop string in bytes, and a little more, shows every match that a new token can complete.
    """
    window = max(len(stop.encode()) for stop in stops) + _MARGIN
    start = max(0, num_checked - window)
    # A match inside the part that was already looked at does not count: it was seen, and passed over, before. That
    # part may end in half a character.
    num_seen = len(tokenizer.decode(list(tokens[start:num_checked])).rstrip(REPLACEMENT))
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
