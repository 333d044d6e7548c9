"""Log-probs of prompts: requests that ask for them are scored before they generate.

A prompt is scored in one go, so all of its log-probs belong to the same version of the weights. It is computed
completely, because the prefix cache holds keys and values and no log-probs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.core.media import identity_tokens
from headwater.core.requests import PromptScores
from headwater.engine.batch_media import BatchMedia
from headwater.engine.guides import alternatives
from headwater.engine.media_reader import MediaFailed
from headwater.engine.pages import PagePool, Pages, prefix_keys
from headwater.engine.plans import PrefillBatch
from headwater.engine.runners.plain import Runner
from headwater.engine.sampler import SamplingNeeds
from headwater.engine.sequence import EngineSequence


@dataclass(eq=False)
class _Job:
    """A prompt on its way."""

    sequence: EngineSequence
    tokens: NDArray[np.int32]
    """With numbers that identify media, see ``core.media.identity_tokens``."""
    targets: NDArray[np.int64]
    """The tokens that follow each of them. Nothing follows the last one, whose score is discarded."""
    pages: Pages
    num_computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed


class PromptScoring:
    """Prompts that wait for their log-probs. The engine's thread owns them."""

    def __init__(self, pool: PagePool, *, page_tokens: int, max_tokens: int, prefix_cache: bool) -> None:
        self.num_tokens = 0
        """How many tokens were scored."""
        self.waiting: deque[EngineSequence] = deque()
        self._pool = pool
        self._page_tokens = page_tokens
        self._max_tokens = max_tokens
        self._prefix_cache = prefix_cache

    def take_out(self, wanted: Callable[[EngineSequence], bool]) -> list[EngineSequence]:
        """Remove the sequences for which ``wanted`` is true."""
        removed = [each for each in self.waiting if wanted(each)]
        self.waiting = deque(each for each in self.waiting if not wanted(each))
        return removed

    def score(self, runner: Runner, version: int) -> list[EngineSequence]:
        """Score as many prompts as fit into one pass, at least one if there are pages for it. Returns their sequences.

        They stay in the queue until all of this has succeeded, so that none is lost if it fails.
        """
        jobs = self._next_jobs()
        try:
            while chunks := list(self._next_chunks(jobs)):
                self._compute(runner, chunks)
        except MediaFailed:
            for job in jobs:
                self._pool.release(job.pages)
            raise
        for job in jobs:
            self.waiting.popleft()
            job.sequence.prompt_scores = PromptScores(tuple(job.logprobs), tuple(job.top_logprobs))
            if self._prefix_cache:
                num_full = len(job.tokens) // self._page_tokens
                self._pool.register(job.pages[:num_full], prefix_keys(job.tokens, self._page_tokens, version))
            self._pool.release(job.pages)
        return [job.sequence for job in jobs]

    def _next_jobs(self) -> list[_Job]:
        jobs: list[_Job] = []
        num_tokens = 0
        for sequence in self.waiting:
            tokens = identity_tokens(sequence.request.input_tokens, sequence.request.media)
            num_tokens += len(tokens)
            num_pages = -(-len(tokens) // self._page_tokens)
            if num_pages > self._pool.num_available or (jobs and num_tokens > self._max_tokens):
                break
            prompt = np.array(sequence.request.input_tokens, np.int64)
            targets = np.append(prompt[1:], prompt[-1:])
            jobs.append(_Job(sequence, tokens, targets, self._pool.allocate(num_pages)))
        return jobs

    def _next_chunks(self, jobs: list[_Job]) -> Iterator[tuple[_Job, int]]:
        budget = self._max_tokens
        for job in jobs:
            count = min(budget, job.num_left)
            if count:
                budget -= count
                yield job, count

    def _compute(self, runner: Runner, chunks: list[tuple[_Job, int]]) -> None:
        table = np.zeros((len(chunks), max(len(job.pages) for job, _ in chunks)), np.int32)
        tokens, positions, slots, targets = [], [], [], []
        media = None
        if any(job.sequence.request.media for job, _ in chunks):
            media = BatchMedia.of([(job.sequence.request.media, job.num_computed, count) for job, count in chunks])
        for place, (job, count) in enumerate(chunks):
            position = np.arange(job.num_computed, job.num_computed + count)
            job.num_computed += count
            table[place, : len(job.pages)] = job.pages
            tokens.append(job.tokens[position])
            positions.append(position)
            slots.append(job.pages[position // self._page_tokens] * self._page_tokens + position % self._page_tokens)
            targets.append(job.targets[position])
        batch = PrefillBatch(
            input_ids=np.maximum(np.concatenate(tokens, dtype=np.int64), 0),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots).astype(np.int64),
            query_lens=[count for _, count in chunks],
            context_lens=[job.num_computed for job, _ in chunks],
            page_table=table,
            copied_pages=(np.zeros(0, np.int32), np.zeros(0, np.int32)),
            new_rows=(),
            new_row_tokens=(),
            needs=SamplingNeeds(),
            media=media,
        )
        num_top = max(job.sequence.request.sampling.num_top_logprobs for job, _ in chunks)
        logprobs, top_tokens, top_logprobs = runner.score(batch, np.concatenate(targets), num_top)
        self.num_tokens += len(logprobs)
        start = 0
        for job, count in chunks:
            end = start + count - (job.num_left == 0)
            job.logprobs += logprobs[start:end].tolist()
            own_top = job.sequence.request.sampling.num_top_logprobs
            if own_top:
                job.top_logprobs += [
                    alternatives(top_tokens[place], top_logprobs[place], own_top) for place in range(start, end)
                ]
            start += count
