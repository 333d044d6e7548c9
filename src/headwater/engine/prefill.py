"""Turns chunks of prompts into one batch, and gives the samples of complete prompts their lanes, rows and pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headwater.engine.lanes import Lanes
from headwater.engine.pages import PagePool, Pages
from headwater.engine.plans import NewRow, PrefillBatch, PrefillPlan
from headwater.engine.prompt_queue import PromptJob
from headwater.engine.prompts import Chunk, Prompts
from headwater.engine.row_map import RowMap


@dataclass
class Begun:
    """Samples that start with a batch, one entry each, and the pages that were copied for them."""

    lanes: list[int] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)
    """The place in the batch of the last token of each one's prompt."""
    copy_sources: list[int] = field(default_factory=list)
    copy_targets: list[int] = field(default_factory=list)


class Prefill:
    def __init__(self, prompts: Prompts, lanes: Lanes, rows: RowMap, pool: PagePool, page_tokens: int) -> None:
        self._prompts = prompts
        self._lanes = lanes
        self._rows = rows
        self._pool = pool
        self._page_tokens = page_tokens

    def plan(self, chunks: list[Chunk]) -> PrefillPlan:
        table = np.zeros((len(chunks), max(len(chunk.job.pages) for chunk in chunks)), np.int32)
        input_ids, positions, slots = [], [], []
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
                input_ids=np.concatenate(input_ids, dtype=np.int64),
                positions=np.concatenate(positions),
                slots=np.concatenate(slots).astype(np.int64),
                query_lens=[chunk.num_tokens for chunk in chunks],
                context_lens=[chunk.job.num_computed for chunk in chunks],
                page_table=table,
                copied_pages=(np.array(begun.copy_sources, np.int32), np.array(begun.copy_targets, np.int32)),
                new_rows=[self._new_row(lane) for lane in begun.lanes],
                new_row_tokens=begun.last_tokens,
                needs=self._lanes.needs_of(lanes),
            ),
            tuple(begun.lanes),
            self._lanes.page_updates(lanes, np.zeros(len(lanes), np.int64)),
        )

    def _begin(self, job: PromptJob, last_token: int, begun: Begun) -> None:
        """Every member of a complete prompt gets a lane, a row and the prompt's pages, the last one copied on write."""
        self._prompts.complete(job)
        for place, member in enumerate(job.members):
            pages = self._pages_for_sample(job, is_last=place == len(job.members) - 1, begun=begun)
            if pages is None:
                self._pool.release(job.pages)
                for left in job.members[place:]:
                    self._prompts.add_again(left, job.key)
                return
            row = self._rows.next_row()
            lane = self._lanes.take(member, row, job.tokens, pages, job.version)
            self._rows.take(row, lane)
            begun.lanes.append(lane)
            begun.last_tokens.append(last_token)

    def _pages_for_sample(self, job: PromptJob, *, is_last: bool, begun: Begun) -> Pages | None:
        """The prompt's pages for one more sample; ``None`` when rows or pages have run out.

        A partly filled page is written to by every sample, so each gets its own; the last one takes over the job's.
        """
        is_partly_filled = len(job.tokens) % self._page_tokens > 0
        if self._rows.is_full or (is_partly_filled and not is_last and not self._pool.num_available):
            return None
        if is_last:
            return job.pages
        pages = job.pages.copy()
        shared = pages[:-1] if is_partly_filled else pages
        self._pool.retain(shared)
        if is_partly_filled:
            begun.copy_sources.append(int(pages[-1]))
            pages[-1] = self._pool.allocate(1)[0]
            begun.copy_targets.append(int(pages[-1]))
        return pages

    def _new_row(self, lane: int) -> NewRow:
        sequence = self._lanes.sequence[lane]
        assert sequence is not None
        return NewRow(
            row=int(self._lanes.row[lane]),
            num_tokens=int(self._lanes.planned[lane]),
            num_generated=len(sequence.tokens),
            sampling=sequence.request.sampling,
            stop_ids=sequence.stop_ids,
            rng_key=sequence.request.rng_key,
        )
