"""Decides what runs next: which chunks of which prompts, which rows, and who makes room when pages run out.

Host bookkeeping only; the loop carries the plans out. Everything that is done per token is a numpy operation over all
lanes; Python touches a sequence when it arrives, starts, is preempted and ends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headwater.engine.lanes import Lanes
from headwater.engine.pages import PagePool, Pages, prefix_keys
from headwater.engine.plans import DecodePlan, Moves, NeedsRoom, NewRow, PrefillBatch, PrefillPlan
from headwater.engine.prompt_queue import PromptJob, PromptQueue
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
        self.version = 0
        self.num_cached_tokens = 0
        self.num_prefilled_tokens = 0
        self.num_preempted = 0
        self._max_prefill_tokens = max_prefill_tokens
        self._prefix_cache = prefix_cache
        self._waiting = PromptQueue()
        self._computing: dict[bytes, PromptJob] = {}
        self._num_computing = 0
        self._held: list[Sequence] = []
        self._is_holding = False
        self._rows = RowMap(max_sequences)

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_sequences + self._num_computing + len(self._held)

    @property
    def num_draining(self) -> int:
        """While others are held: sequences that must end before those are released."""
        return self.num_running + self._waiting.num_sequences + self._num_computing

    @property
    def num_running(self) -> int:
        return self.lanes.capacity - self.lanes.num_free

    @property
    def is_followed(self) -> bool:
        """Whether the host looks at a running sequence's tokens as they come."""
        return bool(self.lanes.watched[self.running()].any())

    def num_pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def add(self, sequence: Sequence) -> None:
        if self._is_holding:
            self._held.append(sequence)
            return
        tokens = sequence.all_tokens()
        job = self._computing.get(tokens.tobytes())
        if job is not None and job.version == self.version:
            # Its prompt is being computed at this moment: one more sample of it.
            job.members.append(sequence)
            self._num_computing += 1
        else:
            self._waiting.add(sequence, tokens)

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

    def preempt(self, lane: int, *, keeps_pages: bool = True) -> int:
        """The sequence gives up its pages and waits to be computed again, tokens and all; returns its row.

        ``keeps_pages``: as long as nobody needs them, they are found again.
        """
        sequence = self.lanes.sequence[lane]
        assert sequence is not None
        self.lanes.collect(lane)
        row = self.end(lane, may_go_on=keeps_pages)
        self._waiting.add(sequence)
        return row

    def preempt_all(self) -> list[int]:
        """Nothing stays in the cache; every sequence waits. Returns the rows that were in use."""
        self._stop_computing()
        return [self.preempt(int(lane), keeps_pages=False) for lane in self.running()]

    def take_waiting(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out sequences that have not started, for good."""
        removed = self._waiting.remove(wanted) + [sequence for sequence in self._held if wanted(sequence)]
        self._held = [sequence for sequence in self._held if not wanted(sequence)]
        for job in list(self._computing.values()):
            gone = [member for member in job.members if wanted(member)]
            job.members = [member for member in job.members if not wanted(member)]
            removed += gone
            self._num_computing -= len(gone)
            if not job.members:
                del self._computing[job.key]
                self.pool.release(job.pages)
        return removed

    def weights_changed(self, version: int) -> None:
        """From now on tokens are of ``version``; nothing new may build on what the cache holds of older weights."""
        self.version = version
        self.pool.forget()
        self.lanes.version[self.running()] = -1
        for job in self._computing.values():
            job.version = -1

    def hold(self) -> None:
        """Only what has started goes on, preempted or not; all else, half-computed prompts too, waits for release."""
        self._stop_computing()
        self._is_holding = True
        self._held += self._waiting.remove(lambda sequence: sequence.started is None)

    def release_held(self) -> None:
        self._is_holding = False
        held, self._held = self._held, []
        for sequence in held:
            self._waiting.add(sequence)

    def plan_prefill(self) -> PrefillPlan | None:
        """The next chunks, oldest prompt first, up to the budget. A long prompt takes several turns; none overtakes."""
        budget = self._max_prefill_tokens
        chunks: list[tuple[PromptJob, int]] = []
        for job in self._computing.values():
            if budget <= 0:
                break
            chunks.append((job, min(budget, job.num_left)))
            budget -= chunks[-1][1]
        beginnings = {self._beginning(job) for job in self._computing.values()}
        while budget > 0 and (first := self._waiting.first()) is not None:
            beginning = self._beginning(first)
            if beginning is not None and beginning in beginnings and not self.pool.knows(beginning):
                self._waiting.set_aside_first()  # its first page is about to be there: not again
                continue
            started = self._start(first)
            if started is None:
                break
            beginnings.add(beginning)
            chunks.append((started, min(budget, started.num_left)))
            budget -= chunks[-1][1]
        self._waiting.take_back()
        return self._pack(chunks) if chunks else None

    def _beginning(self, job: PromptJob) -> bytes | None:
        """The key of the job's first page, where others that start alike could use it."""
        if not self._prefix_cache or len(job.tokens) <= self.page_tokens:
            return None
        return prefix_keys(job.tokens[: self.page_tokens], self.page_tokens, self.version)[0]

    def _start(self, waiting: PromptJob) -> PromptJob | None:
        """A job for as many members of ``waiting`` as there is room for, with its pages; None when all must wait."""
        num_rows_left = self.lanes.num_free - self._num_computing
        if num_rows_left < 1 or waiting.key in self._computing:  # the same tokens come next, when they can be found
            return None
        tokens = waiting.tokens
        keys = prefix_keys(tokens, self.page_tokens, self.version) if self._prefix_cache else []
        # The last token is always computed: its hidden state draws the first new one.
        found = self.pool.match(keys[: (len(tokens) - 1) // self.page_tokens])
        num_new = self.num_pages_of(len(tokens)) - len(found)
        # Every sample will want a page of its own soon; without room for one it would only be preempted.
        if num_new + 1 > self.pool.num_available:
            self.pool.release(found)
            return None
        num_members = max(1, min(len(waiting.members), num_rows_left, self.pool.num_available - num_new))
        job = self._waiting.take(waiting, num_members)
        job.keys = keys
        job.pages = np.concatenate([found, self.pool.allocate(num_new)])
        job.num_computed = len(found) * self.page_tokens
        job.version = self.version
        self.num_cached_tokens += job.num_computed
        self._computing[job.key] = job
        self._num_computing += num_members
        return job

    def _pack(self, chunks: list[tuple[PromptJob, int]]) -> PrefillPlan:
        table = np.zeros((len(chunks), max(len(job.pages) for job, _ in chunks)), np.int32)
        input_ids, positions, slots = [], [], []
        complete: list[tuple[PromptJob, int]] = []
        num_packed = 0
        for place, (job, count) in enumerate(chunks):
            position = np.arange(job.num_computed, job.num_computed + count)
            table[place, : len(job.pages)] = job.pages
            input_ids.append(job.tokens[position])
            positions.append(position)
            slots.append(job.pages[position // self.page_tokens] * self.page_tokens + position % self.page_tokens)
            job.num_computed += count
            num_packed += count
            if not job.num_left:
                complete.append((job, num_packed - 1))
        self.num_prefilled_tokens += num_packed
        context_lens = [job.num_computed for job, _ in chunks]
        started, last_tokens, copies, updates = self._begin_rows(complete)
        new_rows = [self._new_row(lane) for lane in started]
        return PrefillPlan(
            PrefillBatch(
                input_ids=np.concatenate(input_ids),
                positions=np.concatenate(positions),
                slots=np.concatenate(slots).astype(np.int64),
                query_lens=[count for _, count in chunks],
                context_lens=context_lens,
                page_table=table,
                copied_pages=copies,
                new_rows=new_rows,
                new_row_tokens=last_tokens,
                needs=self.lanes.needs_of(np.array(started, np.int64)),
            ),
            tuple(started),
            updates,
        )

    def _begin_rows(
        self, complete: list[tuple[PromptJob, int]]
    ) -> tuple[list[int], list[int], tuple[Pages, Pages], tuple[NDArray[np.int64], NDArray[np.int64], Pages]]:
        """Every member of a complete prompt gets a lane, a row and the prompt's pages, the last one copied on write."""
        started: list[int] = []
        last_tokens: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for job, last in complete:
            del self._computing[job.key]
            self._num_computing -= len(job.members)
            if self._prefix_cache and job.version == self.version:
                num_full = len(job.tokens) // self.page_tokens
                self.pool.register(job.pages[:num_full], job.keys[:num_full])
            num_begun = 0
            for member in job.members:
                pages = self._pages_for_sample(
                    job, is_last=num_begun == len(job.members) - 1, copies=(sources, targets)
                )
                if pages is None:
                    break
                row = self._rows.next_row()
                lane = self.lanes.take(member, row, job.tokens, pages, job.version)
                self._rows.take(row, lane)
                started.append(lane)
                last_tokens.append(last)
                num_begun += 1
            if num_begun < len(job.members):
                self.pool.release(job.pages)
                for member in job.members[num_begun:]:
                    self._waiting.add(member)
        lanes = np.array(started, np.int64)
        updates = self._page_updates(lanes, np.zeros(len(lanes), np.int64))
        return started, last_tokens, (np.array(sources, np.int32), np.array(targets, np.int32)), updates

    def _pages_for_sample(self, job: PromptJob, *, is_last: bool, copies: tuple[list[int], list[int]]) -> Pages | None:
        """The prompt's pages for one more sample; ``None`` when rows or pages have run out.

        A partly filled page is written to by every sample, so each gets its own; the last one takes over the job's.
        """
        is_partly_filled = len(job.tokens) % self.page_tokens > 0
        if self._rows.is_full or (is_partly_filled and not is_last and not self.pool.num_available):
            return None
        if is_last:
            return job.pages
        pages = job.pages.copy()
        shared = pages[:-1] if is_partly_filled else pages
        self.pool.retain(shared)
        if is_partly_filled:
            sources, targets = copies
            sources.append(int(pages[-1]))
            pages[-1] = self.pool.allocate(1)[0]
            targets.append(int(pages[-1]))
        return pages

    def _new_row(self, lane: int) -> NewRow:
        sequence = self.lanes.sequence[lane]
        assert sequence is not None
        return NewRow(
            row=int(self.lanes.row[lane]),
            num_tokens=int(self.lanes.planned[lane]),
            num_generated=len(sequence.tokens),
            sampling=sequence.request.sampling,
            stop_ids=sequence.stop_ids,
            rng_key=sequence.request.rng_key,
        )

    def _stop_computing(self) -> None:
        for job in self._computing.values():
            self.pool.release(job.pages)
            for member in job.members:
                self._waiting.add(member)
        self._computing.clear()
        self._num_computing = 0

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
            if self._computing:
                self._stop_computing()
            else:
                preempted.append(self.preempt(self._youngest()))
                self.num_preempted += 1
        first_new = self.lanes.num_pages[lanes].copy()
        self._grow(lanes, num_new)
        plan = DecodePlan(
            num_rows=self._rows.num_rows,
            num_steps=steps,
            lanes=self._rows.lanes().copy(),
            page_updates=self._page_updates(lanes, first_new),
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

    def _page_updates(
        self, lanes: NDArray[np.int64], first: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Pages]:
        """Device rows, columns and values of the lanes' pages from ``first`` on."""
        count = self.lanes.num_pages[lanes] - first
        lane = np.repeat(lanes, count)
        column = np.repeat(first, count) + np.arange(len(lane)) - np.repeat(np.cumsum(count) - count, count)
        return self.lanes.row[lane], column, self.lanes.page_table[lane, column]

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
