"""Where a response ends because of its text: stop strings and stop tokens.

``find_stop`` finds the token that completes a stop string. ``StopTables`` decides for which sequences that search is
needed at all. A stop string can only be completed by a token that contains its last byte: a token that begins with a
suffix of the stop string, or one that contains the whole string. A table over the vocabulary lists these tokens. Most
rows sample none of them in a round, and for those rows Python does no work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headwater.core.protocols import Tokenizer
from headwater.engine.lanes import Drawn, Lanes
from headwater.engine.sequence import EngineSequence
from headwater.models.token_pieces import REPLACEMENT, TokenPieces, pieces_of

_MARGIN = 4
"""Tokens decoded in addition to the length of the longest stop string, because a character may span several tokens."""
_MAX_TABLES = 64
"""Maximum number of stop-string sets with a table. Rows with other sets are searched every round."""
_ALWAYS = 0
"""The table that contains every token."""
_NO_TEXT = b"\xff"
"""A byte that does not occur in UTF-8 text."""


def find_stop(tokenizer: Tokenizer, tokens: Sequence[int], num_checked: int, stops: Sequence[str]) -> int | None:
    """Number of tokens up to and including the one that completes a stop string, or ``None``.

    Matches that are complete within the first ``num_checked`` tokens are ignored.
    """
    pieces = pieces_of(tokenizer)
    if pieces is None or not are_bytes(stops):
        return _find_in_text(tokenizer, tokens, num_checked, stops)
    wanted = [stop.encode() for stop in stops]
    start = _start_of_window(pieces, tokens, num_checked, max(map(len, wanted)))
    for end, shown in _matches(pieces, tokens, start, num_checked, wanted):
        # The bytes match. Whether the decoded text contains them also depends on neighbouring single-byte tokens, and
        # on whether the decoder strips the first space.
        if tokenizer.decode(list(tokens[_start_of_run(pieces, tokens, start) : end])).endswith(shown):
            return end
    return None


def are_bytes(stops: Sequence[str]) -> bool:
    """Whether these stop strings can be found by comparing the bytes of tokens."""
    return not any(REPLACEMENT in stop for stop in stops)


def _start_of_window(pieces: TokenPieces, tokens: Sequence[int], num_checked: int, num_bytes: int) -> int:
    """The token at which the ``num_bytes`` bytes before ``num_checked`` begin. No later match starts before it."""
    start, num_left = num_checked, num_bytes
    while start and num_left > 0:
        start -= 1
        num_left -= len(pieces.of(tokens[start]))
    return start


def _start_of_run(pieces: TokenPieces, tokens: Sequence[int], start: int) -> int:
    """Where decoding must begin so that single-byte tokens at ``start`` decode as they do in the whole text."""
    while start and (tokens[start - 1] in pieces.single_bytes or not pieces.of(tokens[start - 1])):
        start -= 1
    return start


def _matches(
    pieces: TokenPieces, tokens: Sequence[int], start: int, num_checked: int, wanted: Sequence[bytes]
) -> Iterator[tuple[int, str]]:
    """Matches of a stop string's bytes that end in a token after ``num_checked``, in order.

    Yields the number of tokens up to the match, and the text with which the decoded tokens must end.
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


def _find_in_text(tokenizer: Tokenizer, tokens: Sequence[int], num_checked: int, stops: Sequence[str]) -> int | None:
    """``find_stop`` for any tokenizer, by decoding.

    Every token is assumed to have at least one byte. A window slightly longer than the longest stop string in bytes
    therefore contains every match that a new token can complete.
    """
    window = max(len(stop.encode()) for stop in stops) + _MARGIN
    start = max(0, num_checked - window)
    # Matches inside the part that was already searched are ignored. That part may end with an incomplete character.
    num_seen = len(tokenizer.decode(list(tokens[start:num_checked])).rstrip(REPLACEMENT))
    if not _reaches_beyond(num_seen, tokenizer, tokens[start:], stops):
        return None
    for end in range(num_checked + 1, len(tokens) + 1):
        if _reaches_beyond(num_seen, tokenizer, tokens[start:end], stops):
            return end
    return None


def _reaches_beyond(num_seen: int, tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether a stop string ends after the first ``num_seen`` characters."""
    text = tokenizer.decode(list(tokens))
    return any(text.find(stop, max(0, num_seen - len(stop) + 1)) >= 0 for stop in stops)


def cut_at_stop(tokenizer: Tokenizer, sequence: EngineSequence) -> bool:
    """End a sequence at its first stop string or stop token and discard later tokens. Returns whether it has ended."""
    stops = sequence.request.sampling.stop_strings
    minimum = sequence.request.sampling.min_new_tokens
    num_tokens = len(sequence.tokens)
    if not stops and num_tokens > minimum and not sequence.has_many_stop_ids:
        # The usual case: only the last token can end it, and there is nothing to discard.
        sequence.num_checked = num_tokens
        sequence.has_stopped = sequence.tokens[-1] in sequence.stop_ids
        return sequence.has_stopped
    checked = min(max(sequence.num_checked, minimum), num_tokens)
    by_string = find_stop(tokenizer, sequence.tokens, checked, stops) if stops else None
    # The device ends a row at a stop token, so only the last token can be one. It checks at most MAX_STOP_IDS of them.
    first = checked if sequence.has_many_stop_ids else max(num_tokens - 1, minimum)
    fresh = range(first, num_tokens)
    by_token = next((place + 1 for place in fresh if sequence.tokens[place] in sequence.stop_ids), None)
    ends = [each for each in (by_string, by_token) if each is not None]
    sequence.num_checked = num_tokens
    if not ends:
        return False
    sequence.truncate(min(ends))
    sequence.has_stopped = True
    return True


class StopTables:
    """One table per set of stop strings. A table is kept while a lane uses it, and then until its place is needed.

    The engine's thread owns it.
    """

    def __init__(self, tokenizer: Tokenizer, lanes: Lanes) -> None:
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._table_of_lane = np.full(lanes.capacity, _ALWAYS, np.int64)
        self._tenancy = np.full(lanes.capacity, -1, np.int64)
        """The tenancy (see ``Lanes``) for which the lane's table was looked up."""
        self._places: dict[frozenset[str], int] = {}
        """Least recently used first."""

    def worth_a_look(self, drawn: Drawn) -> list[int]:
        """The watched lanes that are streamed, or that sampled a token which may complete a stop string."""
        lanes = drawn.watched
        for lane in lanes[self._tenancy[lanes] != self._lanes.tenancy[lanes]].tolist():
            self._table_of_lane[lane] = self._table_for(lane)
            self._tenancy[lane] = self._lanes.tenancy[lane]
        tables = self._table_of_lane[lanes]
        if tables.any():  # at least one lane has a table other than _ALWAYS
            # Missing tokens (-1), and tokens without text, map to the last column.
            tokens = np.minimum(drawn.watched_tokens, self._tables.shape[1] - 1)
            lanes = lanes[self._tables[tables, tokens].any(axis=0)]
        numbers: list[int] = lanes.tolist()
        return numbers

    def _table_for(self, lane: int) -> int:
        sequence = self._lanes.sequence[lane]
        assert sequence is not None
        stops = sequence.request.sampling.stop_strings
        if sequence.on_delta is not None or sequence.has_many_stop_ids or not are_bytes(stops) or self._index is None:
            return _ALWAYS
        key = frozenset(stops)
        place = self._places.pop(key, None)
        if place is None:
            place = self._free_place()
            if place == _ALWAYS:
                return place
            self._tables[place] = self._index.may_complete(key)
        self._places[key] = place
        return place

    def _free_place(self) -> int:
        if len(self._places) < _MAX_TABLES:
            return len(self._places) + 1
        is_used = (self._lanes.row >= 0) & (self._tenancy == self._lanes.tenancy)
        used = set(self._table_of_lane[is_used].tolist())
        for key, place in self._places.items():
            if place not in used:
                del self._places[key]
                return place
        return _ALWAYS

    @cached_property
    def _index(self) -> PieceIndex | None:
        pieces = pieces_of(self._tokenizer)
        return PieceIndex(pieces) if pieces is not None else None

    @cached_property
    def _tables(self) -> NDArray[np.bool_]:
        assert self._index is not None
        tables = np.zeros((_MAX_TABLES + 1, len(self._index.pieces.pieces) + 1), np.bool_)
        tables[_ALWAYS] = True
        return tables


@dataclass(frozen=True, eq=False)
class PieceIndex:
    """Finds the tokens whose bytes begin with or contain given bytes, without a loop over all tokens."""

    pieces: TokenPieces

    def may_complete(self, stops: frozenset[str]) -> NDArray[np.bool_]:
        """For each token, whether it may contain the last byte of a stop string. The last entry, no token, is false."""
        table = np.zeros(len(self.pieces.pieces) + 1, np.bool_)
        for stop in stops:
            data = stop.encode()
            for length in range(1, min(len(data), self.pieces.longest) + 1):
                table[self._beginning_with(data[-length:])] = True
            if len(data) <= self.pieces.longest:
                table[self._holding(data)] = True
        return table

    def _beginning_with(self, data: bytes) -> NDArray[np.int64]:
        pieces, order = self._sorted
        # The last byte of UTF-8 text is less than 255, so it can be incremented.
        return order[bisect_left(pieces, data) : bisect_left(pieces, data[:-1] + bytes([data[-1] + 1]))]

    def _holding(self, data: bytes) -> NDArray[np.int64]:
        everything, starts = self._joined
        places = np.flatnonzero(everything[: len(everything) - len(data)] == data[0])
        for offset, byte in enumerate(data[1:], start=1):
            places = places[everything[places + offset] == byte]
        return np.searchsorted(starts, places, side="right") - 1

    @cached_property
    def _sorted(self) -> tuple[list[bytes], NDArray[np.int64]]:
        pieces = self.pieces.pieces
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        return [pieces[token] for token in order], np.array(order, np.int64)

    @cached_property
    def _joined(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """All pieces concatenated with a separator, and the offset at which each one begins."""
        everything = np.frombuffer(b"".join(piece + _NO_TEXT for piece in self.pieces.pieces), np.uint8)
        lengths = [len(piece) + 1 for piece in self.pieces.pieces]
        return everything, np.cumsum([0, *lengths[:-1]])
