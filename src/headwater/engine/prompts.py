"""Sequences that do not run: held back, waiting, or with their prompt being computed; and which prompt comes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headwater.engine.pages import PagePool, prefix_keys
from headwater.engine.prompt_queue import PromptJob, PromptQueue
from headwater.engine.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a prompt, to be computed in one batch."""

    job: PromptJob
    num_tokens: int


class Prompts:
    """Jobs from their arrival until all of their tokens are in the cache, and the pages of those that are under way."""

    def __init__(self, pool: PagePool, *, page_tokens: int, max_prefill_tokens: int, prefix_cache: bool) -> None:
        self.version = 0
        self.num_cached_tokens = 0
        self._pool = pool
        self._page_tokens = page_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._prefix_cache = prefix_cache
        self._waiting = PromptQueue()
        self._computing: dict[bytes, PromptJob] = {}
        self._num_computing = 0
        self._held: list[Sequence] = []
        self._is_holding = False

    @property
    def num_sequences(self) -> int:
        return self.num_admitted + len(self._held)

    @property
    def num_admitted(self) -> int:
        """Sequences that are not held back."""
        return self._waiting.num_sequences + self._num_computing

    @property
    def is_computing(self) -> bool:
        """Whether any prompt has pages already."""
        return bool(self._computing)

    def add(self, sequence: Sequence) -> None:
        if self._is_holding:
            self._held.append(sequence)
            return
        key = sequence.all_tokens().tobytes()
        job = self._computing.get(key)
        if job is not None and job.version == self.version:
            # Its prompt is being computed at this moment: one more sample of it.
            job.members.append(sequence)
            self._num_computing += 1
        else:
            self._waiting.add(sequence, key)

    def add_again(self, sequence: Sequence, key: bytes) -> None:
        """One that had started, or was about to: never held back. ``key`` are its tokens as bytes."""
        self._waiting.add(sequence, key)

    def take_out(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """The sequences that ``wanted`` names; they are gone for good."""
        removed = self._waiting.remove(wanted) + [sequence for sequence in self._held if wanted(sequence)]
        self._held = [sequence for sequence in self._held if not wanted(sequence)]
        for job in list(self._computing.values()):
            gone = [member for member in job.members if wanted(member)]
            job.members = [member for member in job.members if not wanted(member)]
            removed += gone
            self._num_computing -= len(gone)
            if not job.members:
                del self._computing[job.key]
                self._pool.release(job.pages)
        return removed

    def weights_changed(self, version: int) -> None:
        self.version = version
        for job in self._computing.values():
            job.version = -1

    def hold(self) -> None:
        """Keep back what has not started, half-computed prompts too, until ``release_held``."""
        self.stop_computing()
        self._is_holding = True
        self._held += self._waiting.remove(lambda sequence: sequence.started is None)

    def release_held(self) -> None:
        self._is_holding = False
        held, self._held = self._held, []
        for sequence in held:
            self._waiting.add(sequence)

    def stop_computing(self) -> None:
        """Prompts that are half computed give up their pages and wait again."""
        for job in self._computing.values():
            self._pool.release(job.pages)
            for member in job.members:
                self._waiting.add(member, job.key)
        self._computing.clear()
        self._num_computing = 0

    def next_chunks(self, num_free_lanes: int) -> list[Chunk]:
        """Oldest prompt first, up to the budget. A long prompt takes several turns; none overtakes."""
        budget = self._max_prefill_tokens
        chunks: list[Chunk] = []
        for job in self._computing.values():
            if budget <= 0:
                break
            chunks.append(Chunk(job, min(budget, job.num_left)))
            budget -= chunks[-1].num_tokens
        beginnings = {self._beginning(job) for job in self._computing.values()}
        while budget > 0 and (first := self._waiting.first()) is not None:
            beginning = self._beginning(first)
            if beginning is not None and beginning in beginnings and not self._pool.knows(beginning):
                self._waiting.set_aside_first()  # its first page is about to be there: not again
                continue
            started = self._start(first, num_free_lanes - self._num_computing)
            if started is None:
                break
            beginnings.add(beginning)
            chunks.append(Chunk(started, min(budget, started.num_left)))
            budget -= chunks[-1].num_tokens
        self._waiting.take_back()
        return chunks

    def _beginning(self, job: PromptJob) -> bytes | None:
        """The key of the job's first page, where others that start alike could use it."""
        if not self._prefix_cache or len(job.tokens) <= self._page_tokens:
            return None
        return prefix_keys(job.tokens[: self._page_tokens], self._page_tokens, self.version)[0]

    def _start(self, waiting: PromptJob, num_lanes_left: int) -> PromptJob | None:
        """A job for as many members of ``waiting`` as there is room for, with its pages; None when all must wait."""
        if num_lanes_left < 1 or waiting.key in self._computing:  # the same tokens come next, when they can be found
            return None
        tokens = waiting.tokens
        keys = prefix_keys(tokens, self._page_tokens, self.version) if self._prefix_cache else []
        # The last token is always computed: its hidden state draws the first new one.
        found = self._pool.match(keys[: (len(tokens) - 1) // self._page_tokens])
        num_new = -(-len(tokens) // self._page_tokens) - len(found)
        # Every sample will want a page of its own soon; without room for one it would only be preempted.
        if num_new + 1 > self._pool.num_available:
            self._pool.release(found)
            return None
        num_members = max(1, min(len(waiting.members), num_lanes_left, self._pool.num_available - num_new))
        job = self._waiting.take(waiting, num_members)
        job.keys = tuple(keys)
        job.pages = np.concatenate([found, self._pool.allocate(num_new)])
        job.num_computed = len(found) * self._page_tokens
        job.version = self.version
        self.num_cached_tokens += job.num_computed
        self._computing[job.key] = job
        self._num_computing += num_members
        return job

    def complete(self, job: PromptJob) -> None:
        """All tokens of ``job`` are in the cache: its pages can be found, and they are the caller's from now on."""
        del self._computing[job.key]
        self._num_computing -= len(job.members)
        if self._prefix_cache and job.version == self.version:
            num_full = len(job.tokens) // self._page_tokens
            self._pool.register(job.pages[:num_full], job.keys[:num_full])
