"""Which sequence stands in which row of the decode batch."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


class RowMap:
    """Rows and the lanes that hold them. The lowest free row is taken first, so that rows in use stay close together:
    the device computes all rows up to the last one in use."""

    def __init__(self, capacity: int) -> None:
        self.num_rows = 0
        """Rows up to the last one in use."""
        self._lane_of_row = np.full(capacity, -1, np.int64)
        self._free = list(range(capacity))  # a heap

    @property
    def is_full(self) -> bool:
        return not self._free

    def lanes(self) -> NDArray[np.int64]:
        """Of the rows up to the last one in use; -1 where a row is free."""
        return self._lane_of_row[: self.num_rows]

    def running(self) -> NDArray[np.int64]:
        """Lanes that have a row, in the order of their rows."""
        lanes = self.lanes()
        return lanes[lanes >= 0]

    def next_row(self) -> int:
        return self._free[0]

    def take(self, row: int, lane: int) -> None:
        """Give ``next_row`` to ``lane``."""
        taken = heapq.heappop(self._free)
        assert taken == row, "rows are given out lowest first"
        self._lane_of_row[row] = lane
        self.num_rows = max(self.num_rows, row + 1)

    def give_back(self, row: int) -> None:
        self._lane_of_row[row] = -1
        heapq.heappush(self._free, row)
        self._shrink()

    def give_back_all(self) -> list[int]:
        """Every row is free; returns those that were not."""
        rows: list[int] = np.flatnonzero(self._lane_of_row >= 0).tolist()
        self._lane_of_row[:] = -1
        self._free = list(range(len(self._lane_of_row)))
        self.num_rows = 0
        return rows

    def compact(self) -> list[tuple[int, int, int]]:
        """Fill holes with the last rows: ``(from row, to row, lane)`` of each move."""
        moves = []
        while self._free and self._free[0] < self.num_rows:
            target, source = heapq.heappop(self._free), self.num_rows - 1
            lane = int(self._lane_of_row[source])
            self._lane_of_row[target], self._lane_of_row[source] = lane, -1
            heapq.heappush(self._free, source)
            moves.append((source, target, lane))
            self._shrink()
        return moves

    def _shrink(self) -> None:
        while self.num_rows and self._lane_of_row[self.num_rows - 1] < 0:
            self.num_rows -= 1
