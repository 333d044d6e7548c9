"""Decides what runs next: which chunks of which prompts, which rows, and who makes room when pages run out.

Host bookkeeping only; the loop carries the plans out. Everything that is done per token is a numpy operation over all
lanes; Python touches a sequence when it arrives, starts, is preempted and ends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headwater.engine.lanes import Lanes
from headwater.engine.pages import PagePool, prefix_keys
from headwater.engine.plans import DecodePlan, Moves, NeedsRoom, PrefillPlan
from headwater.engine.prefill import Prefill
from headwater.engine.prompts import Prompts
from headwater.engine.row_map import RowMap
from headwater.engine.sequence import Sequence


class Scheduler:
    def __init__(
        self,
        *,
        max_sequences: int,
        max_prefill_tokens: int,
        max_tokens_per_sequence: int,
        pool: PagePool,
        page_tokens: int,
        prefix_cache: bool,
    ) -> None:
        max_pages = -(-max_tokens_per_sequence // page_tokens)
        self.pool = pool
        self.page_tokens = page_tokens
        self.lanes = Lanes(max_sequences, max_pages)
        self.num_prefilled_tokens = 0
        self.num_preempted = 0
        self._prefix_cache = prefix_cache
        self._rows = RowMap(max_sequences)
        self._prompts = Prompts(
            pool, page_tokens=page_tokens, max_prefill_tokens=max_prefill_tokens, prefix_cache=prefix_cache
        )
        self._prefill = Prefill(self._prompts, self.lanes, self._rows, pool, page_tokens)

    @property
    def version(self) -> int:
        """Of the policy whose tokens are drawn now."""
        return self._prompts.version

    @property
    def num_cached_tokens(self) -> int:
        return self._prompts.num_cached_tokens

    @property
    def num_waiting(self) -> int:
        return self._prompts.num_sequences

    @property
    def num_draining(self) -> int:
        """While others are held: sequences that must end before those are released."""
        return self.num_running + self._prompts.num_admitted

    @property
    def num_running(self) -> int:
        return self.lanes.capacity - self.lanes.num_free

    @property
    def is_followed(self) -> bool:
        """Whether the host looks at a running sequence's tokens as they come."""
        return bool(self.lanes.watched[self.running()].any())

    def add(self, sequence: Sequence) -> None:
        self._prompts.add(sequence)

    def running(self) -> NDArray[np.int64]:
        """Lanes in use, in the order of their rows."""
        return self._rows.running()

    def end(self, lane: int, *, may_go_on: bool) -> int:
        """Free a lane whose sequence has ended or goes back to the queue; returns its row. Output is already out.

        ``may_go_on`` keeps its pages findable: for the next turn of a conversation, or after a preemption. A response
        that was cut off by its budget is not worth it.
        """
        lanes = self.lanes
        row = int(lanes.row[lane])
        if may_go_on:
            self._remember(lane)
        self.pool.release(lanes.pages(lane))
        lanes.give_back(lane)
        self._rows.give_back(row)
        return row

    def preempt(self, lane: int) -> int:
        """The sequence gives up its pages and waits to be computed again, tokens and all; returns its row.

        As long as nobody needs the pages, they are found again.
        """
        sequence = self.lanes.sequence[lane]
        assert sequence is not None
        self.lanes.collect(lane)
        key = self.lanes.token_bytes(lane)
        row = self.end(lane, may_go_on=True)
        self._prompts.add_again(sequence, key)
        return row

    def preempt_all(self) -> list[int]:
        """Nothing stays in the cache; every sequence waits. Returns the rows that were in use.

        Generation stands still meanwhile, so pages, lanes and rows are given back all at once.
        """
        self._prompts.stop_computing()
        lanes = self.running()
        self.lanes.collect_all(lanes)
        for lane in lanes.tolist():
            sequence = self.lanes.sequence[lane]
            assert sequence is not None
            self._prompts.add_again(sequence, self.lanes.token_bytes(lane))
        self.pool.drop(self.lanes.pages_of(lanes))
        self.lanes.give_back_all(lanes)
        return self._rows.give_back_all()

    def take_waiting(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out sequences that have not started, for good."""
        return self._prompts.take_out(wanted)

    def weights_changed(self, version: int) -> None:
        """From now on tokens are of ``version``; nothing new may build on what the cache holds of older weights."""
        self._prompts.weights_changed(version)
        self.pool.forget()
        self.lanes.version[self.running()] = -1

    def hold(self) -> None:
        """Only what has started goes on, preempted or not; all else, half-computed prompts too, waits for release."""
        self._prompts.hold()

    def release_held(self) -> None:
        self._prompts.release_held()

    def plan_prefill(self) -> PrefillPlan | None:
        """The next chunks of prompts, and the rows that start where one is complete; ``None`` when none can go on."""
        chunks = self._prompts.next_chunks(self.lanes.num_free)
        if not chunks:
            return None
        self.num_prefilled_tokens += sum(chunk.num_tokens for chunk in chunks)
        return self._prefill.plan(chunks)

    def compact(self) -> Moves:
        """Fill holes among the rows with the last rows."""
        moves = self._rows.compact()
        for _, target, lane in moves:
            self.lanes.row[lane] = target
        return Moves([source for source, _, _ in moves], [target for _, target, _ in moves])

    @property
    def num_rows(self) -> int:
        """Rows up to the last one in use."""
        return self._rows.num_rows

    def plan_decode(self, num_steps: int, *, may_preempt: bool) -> tuple[DecodePlan | None, list[int]]:
        """Pages for the next steps of all rows, and the rows of sequences that had to make room for them.

        ``None`` when every row has used its budget and only its output is still awaited. Raises ``NeedsRoom`` where a
        sequence would have to be preempted and ``may_preempt`` is false.
        """
        preempted: list[int] = []
        while True:
            lanes = self.running()
            left = self.lanes.end[lanes] - self.lanes.planned[lanes]
            if not len(lanes) or left.max() <= 0:
                return None, preempted
            steps = int(min(num_steps, left.max()))
            target = self.lanes.planned[lanes] + np.clip(left, 0, steps)
            num_new = np.maximum(-(-target // self.page_tokens) - self.lanes.num_pages[lanes], 0)
            if num_new.sum() <= self.pool.num_available:
                break
            if not may_preempt:
                raise NeedsRoom
            if self._prompts.is_computing:
                self._prompts.stop_computing()
            else:
                preempted.append(self.preempt(self._youngest()))
                self.num_preempted += 1
        first_new = self.lanes.num_pages[lanes].copy()
        self._grow(lanes, num_new)
        plan = DecodePlan(
            num_rows=self._rows.num_rows,
            num_steps=steps,
            lanes=self._rows.lanes().copy(),
            page_updates=self.lanes.page_updates(lanes, first_new),
            needs=self.lanes.needs_of(lanes),
        )
        return plan, preempted

    def queued(self, num_steps: int) -> None:
        """The planned steps, or fewer of them, are queued on the device."""
        lanes = self.running()
        left = self.lanes.end[lanes] - self.lanes.planned[lanes]
        self.lanes.planned[lanes] += np.clip(left, 0, num_steps)

    def _grow(self, lanes: NDArray[np.int64], num_new: NDArray[np.int64]) -> None:
        pages = self.pool.allocate(int(num_new.sum()))
        lane = np.repeat(lanes, num_new)
        # 0, 1, ... within each lane's new pages
        offset = np.arange(len(lane)) - np.repeat(np.cumsum(num_new) - num_new, num_new)
        self.lanes.page_table[lane, self.lanes.num_pages[lane] + offset] = pages
        self.lanes.num_pages[lanes] += num_new

    def _youngest(self) -> int:
        lanes = self.running()
        return int(lanes[self.lanes.order[lanes].argmax()])

    def _remember(self, lane: int) -> None:
        """Full pages of an ended sequence stay findable: the next turn of its conversation starts with them."""
        lanes = self.lanes
        if not self._prefix_cache or lanes.version[lane] != self.version:
            return
        tokens = lanes.cached_tokens(lane)
        num_full = len(tokens) // self.page_tokens
        if num_full > len(lanes.start[lane]) // self.page_tokens:  # the prompt's own pages are remembered already
            self.pool.register(lanes.pages(lane)[:num_full], prefix_keys(tokens, self.page_tokens, self.version))
