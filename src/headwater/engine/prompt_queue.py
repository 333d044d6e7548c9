"""Requests whose prompt is not in the cache yet, the ones with equal tokens side by side."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.engine.pages import Pages
from headwater.engine.sequence import Sequence

_NO_PAGES: Pages = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class PromptJob:
    """Tokens to compute once, for all ``members`` that start from them."""

    key: bytes
    """The tokens as bytes, 32 bits each."""
    members: list[Sequence]
    pages: Pages = field(default_factory=lambda: _NO_PAGES)
    keys: tuple[bytes, ...] = ()
    """Of its full pages, under which they are remembered."""
    num_computed: int = 0
    """Tokens in the cache so far, found there or computed."""
    version: int = 0
    """Policy version of the cached part; -1 once it is of several."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.frombuffer(self.key, np.int32)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed


class PromptQueue:
    """Waiting jobs, oldest first. A request joins the job of its tokens as long as that job has not ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, PromptJob]] = []
        self._aside: list[tuple[int, int, PromptJob]] = []
        self._waiting: dict[bytes, PromptJob] = {}
        self._num_pushed = 0
        self.num_sequences = 0

    def add(self, sequence: Sequence, key: bytes | None = None) -> None:
        """``key`` are the sequence's tokens as bytes, where the caller has them at hand."""
        key = sequence.all_tokens().tobytes() if key is None else key
        self.num_sequences += 1
        job = self._waiting.get(key)
        if job is None:
            self._push(PromptJob(key, [sequence]), sequence.order)
        else:
            job.members.append(sequence)

    def first(self) -> PromptJob | None:
        while self._heap:
            job = self._heap[0][2]
            if job.members and self._waiting.get(job.key) is job:
                return job
            heapq.heappop(self._heap)
        return None

    def take(self, job: PromptJob, count: int) -> PromptJob:
        """The first ``count`` members of ``job``, as a job that no longer waits; the others go on waiting."""
        self.num_sequences -= count
        if count == len(job.members):
            del self._waiting[job.key]
            return job
        taken = PromptJob(job.key, job.members[:count])
        job.members = job.members[count:]
        return taken

    def set_aside_first(self) -> None:
        """Let ``first`` pass over the job it gives now, until ``take_back``."""
        self._aside.append(heapq.heappop(self._heap))

    def take_back(self) -> None:
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def remove(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out the sequences that ``wanted`` names, in order of arrival."""
        removed: list[Sequence] = []
        for key, job in list(self._waiting.items()):
            gone = [member for member in job.members if wanted(member)]
            if gone:
                job.members = [member for member in job.members if not wanted(member)]
                removed += gone
                if not job.members:
                    del self._waiting[key]
        self.num_sequences -= len(removed)
        return sorted(removed, key=lambda each: each.order)

    def _push(self, job: PromptJob, order: int) -> None:
        self._waiting[job.key] = job
        self._num_pushed += 1
        heapq.heappush(self._heap, (order, self._num_pushed, job))
