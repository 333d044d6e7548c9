"""Which rows may have completed a stop string, by one look at what all of them drew.

A stop string can only be complete with a token in which its last byte may lie: one that begins with an end of the stop
string, or that has all of it inside. A table over the vocabulary says which tokens these are. Most rows draw none of
them in a round, and Python does nothing for those, however many they are.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headwater.core.protocols import Tokenizer
from headwater.engine.lanes import Lanes
from headwater.engine.round import Drawn
from headwater.engine.stop_strings import are_bytes
from headwater.engine.token_pieces import TokenPieces, pieces_of

_MAX_TABLES = 64
"""Sets of stop strings that have tables at a time. Rows with any beyond are looked at every round."""

_ALWAYS = 0
"""The table in which every token counts."""

_NO_TEXT = b"\xff"
"""A byte that no text has."""


class StopTables:
    """Belongs to the engine's thread. A table stays while a lane uses it, and after that until its place is needed."""

    def __init__(self, tokenizer: Tokenizer, lanes: Lanes) -> None:
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._table_of_lane = np.full(lanes.capacity, _ALWAYS, np.int64)
        self._tenancy = np.full(lanes.capacity, -1, np.int64)
        """Whose table that is: as in ``Lanes``, it tells a lane's sequences apart."""
        self._places: dict[frozenset[str], int] = {}
        """The longest unused first."""

    def worth_a_look(self, drawn: Drawn) -> list[int]:
        """Those of the watched lanes that somebody follows, or that drew a token which may complete a stop string."""
        lanes = drawn.watched
        for lane in lanes[self._tenancy[lanes] != self._lanes.tenancy[lanes]].tolist():
            self._table_of_lane[lane] = self._table_for(lane)
            self._tenancy[lane] = self._lanes.tenancy[lane]
        tables = self._table_of_lane[lanes]
        if tables.any():  # and not all of them "always"
            # Entries that are no token, and tokens that have no text, stand for the last column.
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
    """Finds the tokens whose bytes begin with something, or hold it, without a look at every token."""

    pieces: TokenPieces

    def may_complete(self, stops: frozenset[str]) -> NDArray[np.bool_]:
        """Whether the last byte of a stop string may lie in each of the tokens; false in a last place for no token."""
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
        # The last byte of a text is less than 255, so there is a next one.
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
        """All pieces one after the other, apart, and where each begins."""
        everything = np.frombuffer(b"".join(piece + _NO_TEXT for piece in self.pieces.pieces), np.uint8)
        lengths = [len(piece) + 1 for piece in self.pieces.pieces]
        return everything, np.cumsum([0, *lengths[:-1]])
