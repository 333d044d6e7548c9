"""How many prompt groups may be started, so that what they yield is not too old when it is trained on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RolloutCounts:
    enqueued: int = 0
    """Waiting to start."""
    running: int = 0
    accepted: int = 0
    """Ever finished and kept."""
    rejected: int = 0
    """Ever finished and not kept, or failed."""


class StalenessManager:
    """Admission by plain arithmetic; the unit is one prompt group. Safe to use from several threads.

    A learner at version ``v`` has taken ``v`` batches, and a group started now may wait behind all that is accepted or
    running. So at most ``max_staleness + 1`` batches may be ahead: with batches of 4 and ``max_staleness`` 1, 8 groups
    may start at version 0, and 4 more at each later version. A rejected group gives its place back.

    This bounds how far generation runs ahead, not the age of a straggler's tokens; that is checked when a batch is
    taken.
    """

    def __init__(
        self, *, max_concurrent: int, batch_size: int, max_staleness: int, num_batches: int | None = None
    ) -> None:
        """``num_batches`` is how many the learner will take in all: no group is started for one that never comes."""
        self._max_concurrent = max(1, max_concurrent)
        self._batch_size = max(1, batch_size)
        self._max_staleness = max_staleness
        self._num_batches = num_batches
        self._counts = RolloutCounts()
        self._lock = threading.Lock()

    @property
    def counts(self) -> RolloutCounts:
        with self._lock:
            return self._counts

    @property
    def pending_limit(self) -> int:
        """The most groups that may wait for the learner at any time."""
        return (self._max_staleness + 1) * self._batch_size

    def capacity(self, version: int) -> int:
        """How many more groups may start at ``version``; negative where too many already have."""
        counts = self.counts
        by_concurrency = self._max_concurrent - counts.running
        num_batches = self._max_staleness + version + 1
        if self._num_batches is not None:
            num_batches = min(num_batches, self._num_batches)
        allowed = num_batches * self._batch_size
        return min(by_concurrency, allowed - counts.accepted - counts.running)

    def enqueue(self) -> None:
        self._add(enqueued=1)

    def start(self) -> None:
        self._add(enqueued=-1, running=1)

    def accept(self) -> None:
        self._add(running=-1, accepted=1)

    def reject(self) -> None:
        self._add(running=-1, rejected=1)

    def give_back(self) -> None:
        """An accepted group was found too old: as if it had been rejected, or the learner would wait for ever."""
        self._add(accepted=-1, rejected=1)

    def forfeit(self, num_groups: int) -> None:
        """The learner took a batch that is short of so many groups; their places are used up all the same."""
        self._add(accepted=num_groups)

    def recover(self, version: int, num_buffered: int = 0) -> None:
        """After a restart: what earlier batches took, and what a checkpoint still holds, count as accepted."""
        with self._lock:
            self._counts = replace(self._counts, accepted=version * self._batch_size + num_buffered)

    def _add(self, *, enqueued: int = 0, running: int = 0, accepted: int = 0, rejected: int = 0) -> None:
        with self._lock:
            counts = RolloutCounts(
                self._counts.enqueued + enqueued,
                self._counts.running + running,
                self._counts.accepted + accepted,
                self._counts.rejected + rejected,
            )
            if counts.enqueued < 0 or counts.running < 0:
                raise ValueError(f"a rollout ended or started that was not counted before: {counts}")
            self._counts = counts
