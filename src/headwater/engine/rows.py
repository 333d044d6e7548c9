"""The state of the sequences that are being decoded, as tensors: one row of each tensor per sequence.

A decode step reads and writes these tensors only, so its cost in Python does not grow with the number of rows, and on
CUDA it can be captured once and replayed. Rows are kept at the front; a hole is filled by moving the last row into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.engine.plans import MAX_STOP_IDS, NewRow, SamplingNeeds
from headwater.engine.sampler import SamplingBatch
from headwater.engine.upload import upload


class Rows:
    """Device tensors of up to ``capacity`` rows, and the outputs of the last few steps."""

    def __init__(self, capacity: int, max_pages: int, max_steps: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.capacity = capacity
        self.device = device
        self.last_tokens = zeros(capacity)
        self.positions = zeros(capacity)
        self.slots = zeros(capacity)
        self.context_lens = zeros(capacity, dtype=torch.int32)
        self.num_generated = zeros(capacity, dtype=torch.int32)
        self.max_new = zeros(capacity, dtype=torch.int32)
        self.min_new = zeros(capacity, dtype=torch.int32)
        self.alive = zeros(capacity, dtype=torch.bool)
        self.stop_ids = zeros(capacity, MAX_STOP_IDS) - 1
        self.early_stop_ids = zeros(capacity, MAX_STOP_IDS) - 1
        """All stop tokens of rows with a least number of tokens; as wide as the longest list so far needs."""
        self.page_table = zeros(capacity, max_pages, dtype=torch.int32)
        self.keys = zeros(capacity)
        self.temperature = zeros(capacity, dtype=torch.float32)
        self.top_k = zeros(capacity)
        self.top_p = zeros(capacity, dtype=torch.float32) + 1
        self.min_p = zeros(capacity, dtype=torch.float32)
        self.step = zeros(1, dtype=torch.int32)
        self.out_tokens = zeros(max_steps, capacity, dtype=torch.int32)
        self.out_logprobs = zeros(max_steps, capacity, dtype=torch.float32)

    def admit(self, new: Sequence[NewRow]) -> Tensor:
        """Set up rows whose prompts have just been computed; their first token is still to be drawn."""
        rows = self._tensor([each.row for each in new])
        columns: list[tuple[Tensor, list[float] | list[int]]] = [
            (self.positions, [each.num_tokens - 1 for each in new]),
            (self.context_lens, [each.num_tokens for each in new]),
            (self.num_generated, [each.num_generated for each in new]),
            (self.max_new, [each.sampling.max_new_tokens for each in new]),
            (self.min_new, [each.sampling.min_new_tokens for each in new]),
            (self.keys, [each.rng_key for each in new]),
            (self.temperature, [each.sampling.temperature for each in new]),
            (self.top_k, [each.sampling.top_k for each in new]),
            (self.top_p, [each.sampling.top_p for each in new]),
            (self.min_p, [each.sampling.min_p for each in new]),
        ]
        for column, values in columns:
            column[rows] = self._tensor(values, column.dtype)
        self._set_lists(self.stop_ids, rows, [each.stop_ids for each in new])
        if any(each.sampling.min_new_tokens for each in new):
            self._forbid_early(rows, [each.stop_ids if each.sampling.min_new_tokens else () for each in new])
        self.alive[rows] = True
        return rows

    def set_pages(self, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        """Page ``columns[i]`` of row ``rows[i]`` is ``pages[i]``."""
        if len(rows):
            packed = upload(torch.from_numpy(np.stack([rows, columns, pages]).astype(np.int64)), self.device)
            self.page_table[packed[0], packed[1]] = packed[2].to(torch.int32)

    def kill(self, rows: Sequence[int]) -> None:
        """These rows make no further tokens."""
        if rows:
            index = self._tensor(list(rows))
            self.alive[index] = False
            self.slots[index] = 0
            self.context_lens[index] = 0

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows change places; the sources are dead afterwards."""
        if not sources:
            return
        source, target = self._tensor(list(sources)), self._tensor(list(targets))
        for state in self._state():
            state[target] = state[source]
        self.kill(sources)

    def refresh_slots(self, num_rows: int, page_tokens: int) -> None:
        """Where the next token of each row goes; to be called once its page is in the table."""
        rows = slice(0, num_rows)
        self.slots[rows] = self._slots(self.page_table[rows], self.positions[rows], self.alive[rows], page_tokens)

    def advance(self, rows: Tensor, tokens: Tensor, logprobs: Tensor, page_tokens: int) -> None:
        """Take the tokens just drawn for ``rows``: the plain form of ``kernels.advance``.

        A row that is dead draws as well, because leaving it out would change the shape of the step; its token is -1.
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

    def sampling(self, rows: Tensor | slice, needs: SamplingNeeds) -> SamplingBatch:
        return SamplingBatch(
            keys=self.keys[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            needs=needs,
        )

    def forbid_early_stops(self, logits: Tensor, rows: Tensor | slice) -> Tensor:
        """A row that has not made its least number of tokens cannot draw one that would end it."""
        stops = self.early_stop_ids[rows]
        early = (self.num_generated[rows] < self.min_new[rows])[:, None] & (stops >= 0)
        penalty = torch.where(early, -torch.inf, 0.0).to(logits.dtype)
        return logits.scatter_add(1, stops.clamp(min=0), penalty)

    def _forbid_early(self, rows: Tensor, lists: Sequence[Sequence[int]]) -> None:
        width, longest = self.early_stop_ids.shape[1], max(map(len, lists))
        if longest > width:
            # Doubled at least: the table moves, and a CUDA graph that reads it has to be captured again.
            with torch.inference_mode(False):  # it outlives the pass that rows are admitted in
                self.early_stop_ids = F.pad(self.early_stop_ids, (0, max(longest, 2 * width) - width), value=-1)
        self._set_lists(self.early_stop_ids, rows, lists)

    def _set_lists(self, table: Tensor, rows: Tensor, lists: Sequence[Sequence[int]]) -> None:
        """Row by row as much of each list as the table is wide, then -1."""
        values = np.full((len(lists), table.shape[1]), -1, np.int64)
        for place, each in enumerate(lists):
            values[place, : len(each)] = each[: table.shape[1]]
        table[rows] = upload(torch.from_numpy(values), self.device)

    def _state(self) -> tuple[Tensor, ...]:
        return (
            self.last_tokens,
            self.positions,
            self.slots,
            self.context_lens,
            self.num_generated,
            self.max_new,
            self.min_new,
            self.alive,
            self.stop_ids,
            self.early_stop_ids,
            self.page_table,
            self.keys,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
        )

    def _tensor(self, values: list[float] | list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(torch.tensor(values, dtype=dtype), self.device)
