"""Sequences that are not running yet: held back, waiting, or with their prompt being computed.

Sequences that start with the same tokens share one job, so that a prompt is computed once for all of its samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from headwater.core.media import Media, PlacedMedia
from headwater.engine.pages import PagePool, Pages, prefix_keys
from headwater.engine.sequence import EngineSequence

_GATHER_S = 0.1
"""How long requests whose media have been read wait for others that are being read: about the time for 40 pictures."""
_NO_PAGES: Pages = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class PromptJob:
    """Tokens to compute once for all ``members``, which start with them."""

    key: bytes
    """``EngineSequence.all_tokens`` as bytes, 32 bits each."""
    members: list[EngineSequence]
    pages: Pages = field(default_factory=lambda: _NO_PAGES)
    keys: tuple[bytes, ...] = ()
    """The prefix keys of its full pages."""
    num_computed: int = 0
    """Tokens in the cache so far, whether found in the prefix cache or computed."""
    version: int = 0
    """Policy version of the cached part; -1 once several versions are mixed."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.frombuffer(self.key, np.int32)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def media(self) -> Media:
        """Those of every member: media are part of the key."""
        return self.members[0].request.media


class PromptQueue:
    """Waiting jobs, oldest first. A sequence joins the waiting job with the same tokens, if there is one."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, PromptJob]] = []
        self._aside: list[tuple[int, int, PromptJob]] = []
        self._waiting: dict[bytes, PromptJob] = {}
        self._num_pushed = 0
        self.num_sequences = 0

    def add(self, sequence: EngineSequence, key: bytes | None = None) -> None:
        """``key`` is the sequence's tokens as bytes; it is computed unless given."""
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
        """Remove the first ``count`` members of ``job`` from the queue, as one job. The other members keep waiting."""
        self.num_sequences -= count
        if count == len(job.members):
            del self._waiting[job.key]
            return job
        taken = PromptJob(job.key, job.members[:count])
        job.members = job.members[count:]
        return taken

    def set_aside_first(self) -> None:
        """Make ``first`` skip the current first job until ``take_back`` is called."""
        self._aside.append(heapq.heappop(self._heap))

    def take_back(self) -> None:
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def remove(self, wanted: Callable[[EngineSequence], bool]) -> list[EngineSequence]:
        """Remove the sequences for which ``wanted`` is true. Returns them in order of arrival."""
        removed: list[EngineSequence] = []
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


@dataclass(frozen=True)
class PromptChunk:
    """The next tokens of a prompt to compute in one batch."""

    job: PromptJob
    num_tokens: int


class Prompts:
    """Jobs from arrival until all of their tokens are in the cache. Owns the pages of jobs that are being computed."""

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
        self._held: list[EngineSequence] = []
        self._is_holding = False
        self._last_prompt: tuple[tuple[int, ...], list[object]] = (), []
        self._last_key = b""
        """The key of ``_last_prompt``."""

    @property
    def num_sequences(self) -> int:
        return self.num_admitted + len(self._held)

    @property
    def num_admitted(self) -> int:
        """Sequences that are not held back."""
        return self._waiting.num_sequences + self._num_computing

    @property
    def is_computing(self) -> bool:
        """Whether any prompt already has pages."""
        return bool(self._computing)

    def add(self, sequence: EngineSequence) -> None:
        if self._is_holding:
            self._held.append(sequence)
            return
        key = self._key(sequence)
        job = self._computing.get(key)
        if job is not None and job.version == self.version:
            # The same prompt is being computed right now: add one more sample to it.
            job.members.append(sequence)
            self._num_computing += 1
        else:
            self._waiting.add(sequence, key)

    def _key(self, sequence: EngineSequence) -> bytes:
        """See ``PromptJob.key``. Samples of a prompt arrive one after the other and share its tokens."""
        if sequence.tokens:
            return sequence.all_tokens().tobytes()
        prompt = sequence.request.input_tokens
        # Not the media themselves, whose files would be kept.
        media: list[object] = [(item.content.digest, item.blocks) for item in sequence.request.media]
        tokens, last_media = self._last_prompt
        if prompt is not tokens or media != last_media:
            self._last_prompt, self._last_key = (prompt, media), sequence.all_tokens().tobytes()
        return self._last_key

    def add_again(self, sequence: EngineSequence, key: bytes) -> None:
        """Add a sequence that had already started or was about to. It is never held back. ``key``: see ``add``."""
        self._waiting.add(sequence, key)

    def take_out(self, wanted: Callable[[EngineSequence], bool]) -> list[EngineSequence]:
        """Remove the sequences for which ``wanted`` is true. They are not added again."""
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
        """Hold back every sequence that has not started, including partly computed prompts, until ``release_held``."""
        self.stop_computing()
        self._is_holding = True
        self._held += self._waiting.remove(lambda sequence: sequence.started is None)

    def release_held(self) -> None:
        self._is_holding = False
        held, self._held = self._held, []
        for sequence in held:
            self._waiting.add(sequence)

    def stop_computing(self) -> None:
        """Return partly computed prompts to the queue and release their pages."""
        for job in self._computing.values():
            self._pool.release(job.pages)
            for member in job.members:
                self._waiting.add(member, job.key)
        self._computing.clear()
        self._num_computing = 0

    def next_chunks(self, num_free_lanes: int) -> list[PromptChunk]:
        """Chunks for the next batch, oldest prompt first, within the token budget. A long prompt takes several."""
        budget = self._max_prefill_tokens
        chunks: list[PromptChunk] = []
        for job in self._computing.values():
            if budget <= 0:
                break
            chunks.append(PromptChunk(job, min(budget, job.num_left)))
            budget -= chunks[-1].num_tokens
        beginnings = {self._beginning(job) for job in self._computing.values()}
        while budget > 0 and (first := self._waiting.first()) is not None:
            beginning = self._beginning(first)
            if beginning is not None and beginning in beginnings and not self._pool.knows(beginning):
                self._waiting.set_aside_first()  # its first page is being computed: do not compute it twice
                continue
            started = self._start(first, num_free_lanes - self._num_computing)
            if started is None:
                break
            beginnings.add(beginning)
            chunks.append(PromptChunk(started, min(budget, started.num_left)))
            budget -= chunks[-1].num_tokens
        self._waiting.take_back()
        return chunks

    def _beginning(self, job: PromptJob) -> bytes | None:
        """The prefix key of the job's first page, if other prompts could share that page."""
        if not self._prefix_cache or len(job.tokens) <= self._page_tokens:
            return None
        return prefix_keys(job.tokens[: self._page_tokens], self._page_tokens, self.version)[0]

    def _start(self, waiting: PromptJob, num_lanes_left: int) -> PromptJob | None:
        """Allocate pages for as many members of ``waiting`` as fit. Returns None when all of them must wait."""
        if num_lanes_left < 1 or waiting.key in self._computing:  # the same tokens will soon be in the prefix cache
            return None
        tokens = waiting.tokens
        keys = prefix_keys(tokens, self._page_tokens, self.version) if self._prefix_cache else []
        # The last token is always computed: its hidden state is needed to sample the first new token.
        found = self._pool.match(keys[: (len(tokens) - 1) // self._page_tokens])
        num_new = -(-len(tokens) // self._page_tokens) - len(found)
        # Every sample soon needs another page. Without a free page it would be preempted immediately.
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
        """All tokens of ``job`` are in the cache: register its pages for reuse. The caller now owns the pages."""
        del self._computing[job.key]
        self._num_computing -= len(job.members)
        if self._prefix_cache and job.version == self.version:
            num_full = len(job.tokens) // self._page_tokens
            self._pool.register(job.pages[:num_full], job.keys[:num_full])


class UnreadRequests:
    """Requests whose images and videos are being read by other threads, in the order of their arrival. They enter the
    queue when that is done. The engine's thread owns them; other threads only set ``has_news``.

    Pictures are read one by one. Requests that entered one by one would be computed one by one, and the first would run
    alone meanwhile, so those that have been read wait for the others: until all have been read, or they are enough
    tokens for the engine, or for a short time.
    """

    def __init__(self, enough_tokens: int) -> None:
        self.has_news = False
        """Whether the media of a request may have been read since ``take_read`` looked."""
        self._enough_tokens = enough_tokens
        self._deadline: float | None = None
        """When the requests that have been read stop to wait for the others."""
        self._sequences: dict[EngineSequence, None] = {}
        self._waited: tuple[float, float | None] = 0.0, None
        """The seconds of waits that have ended, and when the present one began. Replaced as a whole: others read it."""

    @property
    def waited_s(self) -> float:
        """For how long at least one request has waited here, in total. May be called by any thread."""
        waited_s, since = self._waited
        return waited_s if since is None else waited_s + monotonic() - since

    @property
    def is_due(self) -> bool:
        """Whether to call ``take_read``."""
        return self.has_news or (self._deadline is not None and monotonic() >= self._deadline)

    def until_due(self, limit_s: float) -> float:
        """Seconds until ``is_due`` without news, or ``limit_s`` if that is sooner."""
        if self._deadline is None:
            return limit_s
        return max(0.0, min(limit_s, self._deadline - monotonic()))

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(self._sequences)

    def add(self, sequence: EngineSequence) -> None:
        if not self._sequences:
            self._waited = self._waited[0], monotonic()
        self._sequences[sequence] = None
        if _is_read(sequence):  # otherwise another thread will tell
            self.has_news = True

    def take_read(self) -> Iterator[EngineSequence]:
        """Requests whose media have been read, or cannot be read, if they need not wait for others.

        Each is removed after the caller has processed it, so that it fails with the others if this fails.
        """
        self.has_news = False  # before looking: what is read from now on is news
        read = self._read()
        if read and self._waits(read):
            return
        self._deadline = None
        for sequence in read:
            yield sequence
            self._remove(sequence)

    def read_media(self) -> Iterator[PlacedMedia]:
        """What has been read for requests that still wait for others. Samples of a prompt share it."""
        if self._deadline is None:
            return
        seen: set[int] = set()
        for sequence in self._read():
            assert sequence.reading is not None
            if id(sequence.reading.checks) not in seen and sequence.reading.error() is None:
                yield from sequence.request.media
            seen.add(id(sequence.reading.checks))

    def _read(self) -> list[EngineSequence]:
        read, is_done = [], dict[int, bool]()
        for sequence in self._sequences:
            checks = id(None if sequence.reading is None else sequence.reading.checks)
            if checks not in is_done:  # the samples of a prompt share them
                is_done[checks] = _is_read(sequence)
            if is_done[checks]:
                read.append(sequence)
        return read

    def _waits(self, read: list[EngineSequence]) -> bool:
        if len(read) == len(self._sequences):
            return False
        # The samples of a prompt are computed together.
        prompts = {id(each.request.input_tokens): len(each.request.input_tokens) for each in read}
        if sum(prompts.values()) >= self._enough_tokens:
            return False
        if self._deadline is None:
            self._deadline = monotonic() + _GATHER_S
        return monotonic() < self._deadline

    def take_out(self, wanted: Callable[[EngineSequence], bool]) -> list[EngineSequence]:
        """Remove the sequences for which ``wanted`` is true."""
        removed = list(filter(wanted, self._sequences))
        for sequence in removed:
            self._remove(sequence)
        self.has_news = bool(self._sequences)  # those that are left may have waited for these
        return removed

    def _remove(self, sequence: EngineSequence) -> None:
        del self._sequences[sequence]
        if not self._sequences:
            self._waited = self.waited_s, None


def _is_read(sequence: EngineSequence) -> bool:
    return sequence.reading is None or sequence.reading.is_done
