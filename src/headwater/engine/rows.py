"""The rows of the decode batch: which lane each row belongs to (host) and the state of each row (device tensors).

A decode step reads and writes only the tensors in ``DecodeRows``. Its cost in Python therefore does not grow with the
number of rows, and on CUDA the step can be captured once and replayed. Rows in use are kept at the front: the last row
moves into a gap when one opens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headwater.engine.plans import MAX_STOP_IDS, NewRow
from headwater.engine.sampler import SamplingBatch, SamplingNeeds

_ALIGNED_ROWS = 64
"""Columns that share memory begin at multiples of this many values, as if they had been allocated separately."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to ``device``. On a CPU it is returned unchanged."""
    if device.type == "cuda":
        # Pinned memory makes the copy asynchronous. A copy from pageable memory would wait for all queued steps.
        return values.pin_memory().to(device, non_blocking=True)
    return values


class RowMap:
    """Maps rows to the lanes that occupy them.

    The lowest free row is used first, because the device computes every row up to the last one in use.
    """

    def __init__(self, capacity: int) -> None:
        self.num_rows = 0
        """Number of rows up to the last one in use."""
        self._lane_of_row = np.full(capacity, -1, np.int64)
        self._free = list(range(capacity))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lanes(self) -> NDArray[np.int64]:
        """The lane of each row up to the last one in use; -1 for a free row."""
        return self._lane_of_row[: self.num_rows]

    def running(self) -> NDArray[np.int64]:
        """Lanes that occupy a row, in row order."""
        lanes = self.lanes()
        return lanes[lanes >= 0]

    def take(self, count: int) -> list[int]:
        """The ``count`` lowest free rows. They are in use once ``assign`` has given them to lanes."""
        return [heapq.heappop(self._free) for _ in range(count)]

    def assign(self, rows: Sequence[int], lanes: Sequence[int]) -> None:
        self._lane_of_row[rows] = lanes
        self.num_rows = max(self.num_rows, rows[-1] + 1)

    def give_back(self, rows: Sequence[int]) -> None:
        self._lane_of_row[rows] = -1
        for row in rows:
            heapq.heappush(self._free, row)
        self._shrink()

    def give_back_all(self) -> list[int]:
        """Free every row. Returns the rows that were in use."""
        rows: list[int] = np.flatnonzero(self._lane_of_row >= 0).tolist()
        self._lane_of_row[:] = -1
        self._free = list(range(len(self._lane_of_row)))
        self.num_rows = 0
        return rows

    def compact(self) -> list[tuple[int, int, int]]:
        """Fill gaps with the last rows. Returns ``(source row, target row, lane)`` for each move."""
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
        used = np.flatnonzero(self._lane_of_row[: self.num_rows] >= 0)
        self.num_rows = int(used[-1]) + 1 if len(used) else 0


class DecodeRows:
    """Device tensors for up to ``capacity`` rows, and the outputs of the most recent steps."""

    def __init__(self, capacity: int, max_pages: int, max_steps: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.capacity = capacity
        self.device = device
        self.last_tokens = zeros(capacity)
        self.slots = zeros(capacity)
        # What a new row sets is written together: one operation for each type.
        width = -(-capacity // _ALIGNED_ROWS) * _ALIGNED_ROWS
        self._longs = zeros(4, width)
        self._ints = zeros(4, width, dtype=torch.int32)
        self._floats = zeros(3, width, dtype=torch.float32)
        self.positions, self.rotary_shift, self.keys, self.top_k = torch.unbind(self._longs[:, :capacity])
        """``rotary_shift`` is added to the positions of models whose media have grids. Other models do not read it."""
        self.context_lens, self.num_generated, self.max_new, self.min_new = torch.unbind(self._ints[:, :capacity])
        self.temperature, self.top_p, self.min_p = torch.unbind(self._floats[:, :capacity])
        self.top_p += 1
        self.alive = zeros(capacity, dtype=torch.bool)
        self.stop_ids = zeros(capacity, MAX_STOP_IDS) - 1
        self.early_stop_ids = zeros(capacity, MAX_STOP_IDS) - 1
        """All stop tokens of the rows that have a minimum length. Its width is that of the longest list so far."""
        self.page_table = zeros(capacity, max_pages, dtype=torch.int32)
        self.cut_rows = zeros(capacity)
        """The rows whose distribution is truncated, for CUDA graphs, which read it here."""
        self.step = zeros(1, dtype=torch.int32)
        self.out_tokens = zeros(max_steps, capacity, dtype=torch.int32)
        self.out_logprobs = zeros(max_steps, capacity, dtype=torch.float32)

    def admit(self, new: Sequence[NewRow]) -> Tensor:
        """Initialise rows whose prompts have just been computed. Their first token has not been sampled yet."""
        settings = [each.sampling for each in new]
        longs = [
            [each.row for each in new],
            [each.num_tokens - 1 for each in new],
            [each.rotary_shift for each in new],
            [each.rng_key for each in new],
            [each.top_k for each in settings],
            [each.num_tokens for each in new],
            [each.num_generated for each in new],
            [each.max_new_tokens for each in settings],
            [each.min_new_tokens for each in settings],
        ]
        floats = [[each.temperature, each.top_p, each.min_p] for each in settings]
        stops = _filled([each.stop_ids for each in new], self.stop_ids.shape[1])
        # Two copies to the device for all columns. Every operation of torch lets another thread take the interpreter.
        whole = upload(torch.from_numpy(np.concatenate([np.array(longs, np.int64), stops.T])), self.device)
        parts = upload(torch.from_numpy(np.array(floats, np.float32).T.copy()), self.device)
        rows = whole[0]
        self._longs[:, rows] = whole[1:5]
        self._ints[:, rows] = whole[5:9].to(torch.int32)
        self._floats[:, rows] = parts
        self.stop_ids[rows] = whole[9:].T
        if any(each.sampling.min_new_tokens for each in new):
            self._forbid_early(rows, [each.stop_ids if each.sampling.min_new_tokens else () for each in new])
        # Assigning a number to ``self.alive[rows]`` would copy it from ordinary memory, which waits for the device.
        self.alive.index_fill_(0, rows, True)
        return rows

    def set_pages(self, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        """Set entry ``columns[i]`` of row ``rows[i]`` in the page table to ``pages[i]``."""
        if len(rows):
            packed = upload(torch.from_numpy(np.stack([rows, columns, pages]).astype(np.int64)), self.device)
            self.page_table[packed[0], packed[1]] = packed[2].to(torch.int32)

    def set_cut_rows(self, rows: np.ndarray, count: int) -> None:
        """Write the rows that are truncated, repeated up to ``count`` entries."""
        self.cut_rows[:count] = upload(torch.from_numpy(np.resize(rows, count).astype(np.int64)), self.device)

    def kill(self, rows: Sequence[int]) -> None:
        """Stop generating for these rows."""
        if rows:
            index = self._tensor(list(rows))
            for column, value in ((self.alive, False), (self.slots, 0), (self.context_lens, 0)):
                column.index_fill_(0, index, value)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the state of ``sources`` to ``targets`` and stop the source rows."""
        if not sources:
            return
        source, target = self._tensor(list(sources)), self._tensor(list(targets))
        for state in self._state():
            state[target] = state[source]
        self.kill(sources)

    def refresh_slots(self, num_rows: int, page_tokens: int) -> None:
        """Compute the cache slot of each row's next token. Call this after its page has been entered in the table."""
        rows = slice(0, num_rows)
        self.slots[rows] = self._slots(self.page_table[rows], self.positions[rows], self.alive[rows], page_tokens)

    def advance(self, rows: Tensor, tokens: Tensor, logprobs: Tensor, page_tokens: int) -> None:
        """Record the tokens just sampled for ``rows`` and update their state, as ``kernels.advance`` does on CUDA.

        A stopped row is sampled as well, because omitting it would change the shape of the step. Its token is -1.
        """
        alive = self.alive[rows]
        step = self.step.to(torch.int64)
        self.out_tokens[step, rows] = torch.where(alive, tokens, -1).to(torch.int32)
        self.out_logprobs[step, rows] = logprobs
        self.last_tokens[rows] = torch.where(alive, tokens, self.last_tokens[rows])
        grown = alive.to(torch.int32)
        num_generated = self.num_generated[rows] + grown
        self.num_generated[rows] = num_generated
        stopped = (tokens[:, None] == self.stop_ids[rows]).any(dim=1) & (num_generated > self.min_new[rows])
        alive = alive & ~stopped & (num_generated < self.max_new[rows])
        self.alive[rows] = alive
        positions = self.positions[rows] + grown
        self.positions[rows] = positions
        self.context_lens[rows] = torch.where(alive, self.context_lens[rows] + grown, 0)
        self.slots[rows] = self._slots(self.page_table[rows], positions, alive, page_tokens)
        self.step += 1

    @staticmethod
    def _slots(page_table: Tensor, positions: Tensor, alive: Tensor, page_tokens: int) -> Tensor:
        column = torch.where(alive, positions // page_tokens, 0)
        page = page_table.gather(1, column[:, None])[:, 0].to(torch.int64)
        return torch.where(alive, page * page_tokens + positions % page_tokens, 0)

    def sampling(self, rows: Tensor | slice, needs: SamplingNeeds, cut_rows: Tensor | None = None) -> SamplingBatch:
        return SamplingBatch(
            keys=self.keys[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            needs=needs,
            cut_rows=cut_rows,
        )

    def forbid_early_stops(self, logits: Tensor, rows: Tensor | slice) -> Tensor:
        """Give stop tokens a probability of zero in rows that have not reached their minimum length."""
        stops = self.early_stop_ids[rows]
        early = (self.num_generated[rows] < self.min_new[rows])[:, None] & (stops >= 0)
        penalty = torch.where(early, -torch.inf, 0.0).to(logits.dtype)
        return logits.scatter_add(1, stops.clamp(min=0), penalty)

    def _forbid_early(self, rows: Tensor, lists: Sequence[Sequence[int]]) -> None:
        width, longest = self.early_stop_ids.shape[1], max(map(len, lists))
        if longest > width:
            # At least double the width: the table moves, so CUDA graphs that read it must be captured again.
            with torch.inference_mode(False):  # the table outlives the pass in which rows are admitted
                self.early_stop_ids = F.pad(self.early_stop_ids, (0, max(longest, 2 * width) - width), value=-1)
        self._set_lists(self.early_stop_ids, rows, lists)

    def _set_lists(self, table: Tensor, rows: Tensor, lists: Sequence[Sequence[int]]) -> None:
        table[rows] = upload(torch.from_numpy(_filled(lists, table.shape[1])), self.device)

    def _state(self) -> tuple[Tensor, ...]:
        return (
            self.last_tokens,
            self.slots,
            self._longs.T,
            self._ints.T,
            self._floats.T,
            self.alive,
            self.stop_ids,
            self.early_stop_ids,
            self.page_table,
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return upload(torch.tensor(values, dtype=torch.int64), self.device)


def _filled(lists: Sequence[Sequence[int]], width: int) -> NDArray[np.int64]:
    """``[lists, width]``: each list, cut to the width and padded with -1."""
    values = np.full((len(lists), width), -1, np.int64)
    if all(each is lists[0] for each in lists):  # usually the end tokens of the model
        values[:, : len(lists[0])] = lists[0][:width]
    else:
        for place, each in enumerate(lists):
            values[place, : len(each)] = each[:width]
    return values
