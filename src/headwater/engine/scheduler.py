"""Decides what runs next: which chunks of which prompts, which rows, and which sequence is preempted for its pages.

This is host bookkeeping only; the loop executes the plans. Per-token work consists of numpy operations over all lanes.
Python handles an individual sequence only when it arrives, starts, is preempted, or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.core.media import rotary_shift
from headwater.engine.batch_media import BatchMedia
from headwater.engine.lanes import Lanes
from headwater.engine.pages import PagePool, prefix_keys
from headwater.engine.plans import DecodePlan, Moves, NeedsRoom, NewRow, PrefillBatch, PrefillPlan
from headwater.engine.prompts import PromptChunk, PromptJob, Prompts
from headwater.engine.rows import RowMap
from headwater.engine.sequence import EngineSequence


@dataclass
class Begun:
    """The samples that start with a batch, one entry each, and the pages that are copied for them."""

    lanes: list[int] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)
    """For each sample, the index in the batch of the last token of its prompt."""
    copy_sources: list[int] = field(default_factory=list)
    copy_targets: list[int] = field(default_factory=list)


class Prefill:
    """Packs chunks of prompts into one batch and assigns lanes, rows and pages to the samples of complete prompts."""

    def __init__(self, prompts: Prompts, lanes: Lanes, rows: RowMap, pool: PagePool, page_tokens: int) -> None:
        self._prompts = prompts
        self._lanes = lanes
        self._rows = rows
        self._pool = pool
        self._page_tokens = page_tokens

    def plan(self, chunks: list[PromptChunk]) -> PrefillPlan:
        table = np.zeros((len(chunks), max(len(chunk.job.pages) for chunk in chunks)), np.int32)
        input_ids, positions, slots = [], [], []
        media = None
        if any(each.job.media for each in chunks):
            media = BatchMedia.of([(each.job.media, each.job.num_computed, each.num_tokens) for each in chunks])
        complete: list[tuple[PromptJob, int]] = []
        num_packed = 0
        for place, chunk in enumerate(chunks):
            job = chunk.job
            position = np.arange(job.num_computed, job.num_computed + chunk.num_tokens)
            table[place, : len(job.pages)] = job.pages
            input_ids.append(job.tokens[position])
            positions.append(position)
            slots.append(job.pages[position // self._page_tokens] * self._page_tokens + position % self._page_tokens)
            job.num_computed += chunk.num_tokens
            num_packed += chunk.num_tokens
            if not job.num_left:
                complete.append((job, num_packed - 1))
        begun = Begun()
        for job, last_token in complete:
            self._begin(job, last_token, begun)
        lanes = np.array(begun.lanes, np.int64)
        return PrefillPlan(
            PrefillBatch(
                input_ids=np.maximum(np.concatenate(input_ids, dtype=np.int64), 0),
                positions=np.concatenate(positions),
                slots=np.concatenate(slots).astype(np.int64),
                query_lens=[chunk.num_tokens for chunk in chunks],
                context_lens=[chunk.job.num_computed for chunk in chunks],
                page_table=table,
                copied_pages=(np.array(begun.copy_sources, np.int32), np.array(begun.copy_targets, np.int32)),
                new_rows=self._new_rows(lanes),
                new_row_tokens=begun.last_tokens,
                needs=self._lanes.needs_of(lanes),
                media=media,
            ),
            tuple(begun.lanes),
            self._lanes.page_updates(lanes, np.zeros(len(lanes), np.int64)),
        )

    def _begin(self, job: PromptJob, last_token: int, begun: Begun) -> None:
        """Assign a lane, a row and the prompt's pages to every member of a complete prompt, as far as there is room.

        Every sample writes to a partly filled page, so each gets a copy of it. The last sample uses the original.
        """
        self._prompts.complete(job)
        is_partly_filled = len(job.tokens) % self._page_tokens > 0
        num_members = num_begun = len(job.members)
        if is_partly_filled and num_members - 1 > self._pool.num_available:
            num_begun = self._pool.num_available
        num_begun = min(num_begun, self._rows.num_free)
        num_copies = num_begun - (num_begun == num_members)
        pages = np.tile(job.pages, (num_begun, 1))
        self._pool.retain(job.pages[: len(job.pages) - is_partly_filled], num_copies)
        if is_partly_filled:
            pages[:num_copies, -1] = self._pool.allocate(num_copies)
            begun.copy_sources += [int(job.pages[-1])] * num_copies
            begun.copy_targets += pages[:num_copies, -1].tolist()
        if num_begun < num_members:
            self._pool.release(job.pages)
            for left in job.members[num_begun:]:
                self._prompts.add_again(left, job.key)
        if num_begun:
            rows = self._rows.take(num_begun)
            lanes = self._lanes.take(job.members[:num_begun], rows, job.tokens, pages, job.version)
            self._rows.assign(rows, lanes)
            begun.lanes += lanes
            begun.last_tokens += [last_token] * num_begun

    def _new_rows(self, lanes: NDArray[np.int64]) -> list[NewRow]:
        new = []
        numbers = lanes.tolist(), self._lanes.row[lanes].tolist(), self._lanes.planned[lanes].tolist()
        for lane, row, num_tokens in zip(*numbers, strict=True):
            sequence = self._lanes.sequence[lane]
            assert sequence is not None
            request, media = sequence.request, sequence.request.media
            shift = rotary_shift(media) if media else 0
            num_generated = len(sequence.tokens)
            new.append(
                NewRow(row, num_tokens, num_generated, request.sampling, sequence.stop_ids, request.rng_key, shift)
            )
        return new


class Scheduler:
    """Owns lanes, rows, prompts and the page pool. The engine's thread calls it."""

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
        self.prefix_cache = prefix_cache
        self._rows = RowMap(max_sequences)
        self._prompts = Prompts(
            pool, page_tokens=page_tokens, max_prefill_tokens=max_prefill_tokens, prefix_cache=prefix_cache
        )
        self._prefill = Prefill(self._prompts, self.lanes, self._rows, pool, page_tokens)

    @property
    def version(self) -> int:
        """Version of the policy that samples tokens now."""
        return self._prompts.version

    @property
    def num_cached_tokens(self) -> int:
        return self._prompts.num_cached_tokens

    @property
    def num_waiting(self) -> int:
        return self._prompts.num_sequences

    @property
    def num_draining(self) -> int:
        """While new sequences are held back: the number of sequences that must end before they are released."""
        return self.num_running + self._prompts.num_admitted

    @property
    def num_running(self) -> int:
        return self.lanes.capacity - self.lanes.num_free

    @property
    def is_followed(self) -> bool:
        """Whether the host inspects the tokens of any running sequence as they arrive."""
        return bool(self.lanes.watched[self.running()].any())

    def add(self, sequence: EngineSequence) -> None:
        self._prompts.add(sequence)

    def running(self) -> NDArray[np.int64]:
        """Lanes in use, in row order."""
        return self._rows.running()

    def end(self, lane: int, *, may_go_on: bool) -> int:
        """Free a lane whose sequence has ended or returns to the queue, with its output collected. Returns its row.

        ``may_go_on`` keeps its pages in the prefix cache, for the next turn of a conversation or after a preemption.
        A response that reached its token limit is unlikely to be continued.
        """
        lanes = self.lanes
        row = int(lanes.row[lane])
        if may_go_on:
            self._remember(lane)
        self.pool.release(lanes.pages(lane))
        lanes.give_back(lane)
        self._rows.give_back([row])
        return row

    def end_all(self, lanes: Sequence[int], may_go_on: Sequence[bool]) -> None:
        """``end`` for many lanes at once, in a number of array operations that does not depend on theirs.

        Many short responses end in one round. Every small array operation may give the interpreter to another thread.
        """
        for lane, is_kept in zip(lanes, may_go_on, strict=True):
            if is_kept:
                self._remember(lane)
        ended = np.array(lanes, np.int64)
        self.pool.release_all(self.lanes.last_pages_first(ended))
        self._rows.give_back(self.lanes.row[ended].tolist())
        self.lanes.give_back_all(ended)

    def preempt(self, lane: int) -> int:
        """Release the pages of a sequence and return it to the queue with all its tokens. Returns its row.

        Until the pages are reused, the prefix cache finds them again.
        """
        sequence = self.lanes.sequence[lane]
        assert sequence is not None
        self.lanes.collect(lane)
        key = self.lanes.token_bytes(lane)
        row = self.end(lane, may_go_on=True)
        self._prompts.add_again(sequence, key)
        return row

    def preempt_all(self) -> list[int]:
        """Empty the cache and return every sequence to the queue. Returns the rows that were in use.

        Generation is stopped meanwhile, so pages, lanes and rows are released in bulk.
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

    def take_waiting(self, wanted: Callable[[EngineSequence], bool]) -> list[EngineSequence]:
        """Remove sequences that are not running. They are not added again."""
        return self._prompts.take_out(wanted)

    def weights_changed(self, version: int) -> None:
        """From now on, tokens have this version. New sequences do not reuse cache entries of older weights."""
        self._prompts.weights_changed(version)
        self.pool.forget()
        self.lanes.version[self.running()] = -1

    def hold(self) -> None:
        """Hold back every sequence that has not started. Started sequences continue, even after a preemption."""
        self._prompts.hold()

    def release_held(self) -> None:
        self._prompts.release_held()

    def plan_prefill(self) -> PrefillPlan | None:
        """The next chunks of prompts, and the rows that start with them; ``None`` when no prompt can be computed."""
        chunks = self._prompts.next_chunks(self.lanes.num_free)
        if not chunks:
            return None
        self.num_prefilled_tokens += sum(chunk.num_tokens for chunk in chunks)
        return self._prefill.plan(chunks)

    def compact(self) -> Moves:
        """Fill gaps among the rows with the last rows."""
        moves = self._rows.compact()
        for _, target, lane in moves:
            self.lanes.row[lane] = target
        return Moves([source for source, _, _ in moves], [target for _, target, _ in moves])

    @property
    def num_rows(self) -> int:
        """Number of rows up to the last one in use."""
        return self._rows.num_rows

    def plan_decode(self, num_steps: int, *, may_preempt: bool) -> tuple[DecodePlan | None, list[int]]:
        """Allocate pages for the next steps of all rows. Returns the plan, and the rows that were preempted for it.

        The plan is ``None`` when every row has used its budget and only its output is pending. Raises ``NeedsRoom`` if
        a sequence must be preempted and ``may_preempt`` is false.
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
            cut_rows=self.lanes.cut_rows_of(lanes),
        )
        return plan, preempted

    def queued(self, num_steps: int) -> None:
        """Record that ``num_steps`` steps, at most the planned ones, are queued on the device."""
        lanes = self.running()
        left = self.lanes.end[lanes] - self.lanes.planned[lanes]
        self.lanes.planned[lanes] += np.clip(left, 0, num_steps)

    def _grow(self, lanes: NDArray[np.int64], num_new: NDArray[np.int64]) -> None:
        pages = self.pool.allocate(int(num_new.sum()))
        lane = np.repeat(lanes, num_new)
        # 0, 1, ... within the new pages of each lane
        offset = np.arange(len(lane)) - np.repeat(np.cumsum(num_new) - num_new, num_new)
        self.lanes.page_table[lane, self.lanes.num_pages[lane] + offset] = pages
        self.lanes.num_pages[lanes] += num_new

    def _youngest(self) -> int:
        lanes = self.running()
        return int(lanes[self.lanes.order[lanes].argmax()])

    def _remember(self, lane: int) -> None:
        """Register the full pages of a sequence: the next turn of its conversation starts with them."""
        lanes = self.lanes
        if not self.prefix_cache or lanes.version[lane] != self.version:
            return
        tokens = lanes.cached_tokens(lane)
        num_full = len(tokens) // self.page_tokens
        if num_full > len(lanes.start[lane]) // self.page_tokens:  # the prompt's pages are already registered
            self.pool.register(lanes.pages(lane)[:num_full], prefix_keys(tokens, self.page_tokens, self.version))
