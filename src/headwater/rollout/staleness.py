"""How far generation may run ahead of training: how many prompt groups may start now."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Admission:
    """When groups may start, and what happens to groups that become too old."""

    batch_size: int
    """Groups per training step."""
    max_staleness: int = 0
    """The largest allowed difference between the learner's version and the version of a trained token."""
    max_concurrent: int = 0
    """The most groups that run at the same time; 0 means as many as staleness allows."""
    num_batches: int | None = None
    """The number of batches the learner will take; None means no limit."""
    on_stale: Literal["mask", "drop", "wait"] = "mask"
    """What to do with tokens that are too old; see ``rollout.on_stale``."""
    in_waves: bool = True
    """Start prompts together, and start the next ones after all of them have ended. The engine's batch composition
    decides the last bits of log-probs, and in waves it does not depend on timing."""
    holds_engine: bool = True
    """In waves, pause the engine until the first requests of all episodes have arrived."""
    in_order: bool = False
    """Take groups strictly in the order in which they were drawn, whichever finish first."""
    max_rounds: int | None = None
    """A step continues with a smaller batch after this many batches' worth of prompts; None means no limit."""

    @property
    def most_ahead(self) -> int:
        """The most groups that may be ahead of the learner at any time."""
        return (self.max_staleness + 1) * self.batch_size


@dataclass(frozen=True)
class RolloutCounts:
    enqueued: int = 0
    """Groups that wait to start."""
    running: int = 0
    """Groups that run now."""
    accepted: int = 0
    """Groups that finished and were kept, since the beginning of the run."""
    rejected: int = 0
    """Groups that failed or were not kept, since the beginning of the run."""


class StalenessManager:
    """Decides how many groups may start, by arithmetic on counts. The unit is one prompt group. Thread-safe.

    A learner at version ``v`` has taken ``v`` batches, and a group that starts now may wait behind everything that is
    accepted or running. Therefore at most ``max_staleness + 1`` batches may be ahead: with batches of 4 and
    ``max_staleness`` 1, 8 groups may start at version 0, and 4 more at each later version. A rejected group frees its
    place.

    This limits how far generation runs ahead. It does not limit the age of a slow group's tokens, which is checked when
    a batch is taken.
    """

    def __init__(
        self, *, max_concurrent: int, batch_size: int, max_staleness: int, num_batches: int | None = None
    ) -> None:
        """``num_batches`` is the number of batches the learner will take; no group starts for a later batch."""
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

    def capacity(self, version: int) -> int:
        """How many more groups may start at ``version``. Negative if too many have started."""
        counts = self.counts
        by_concurrency = self._max_concurrent - counts.running
        num_batches = self._max_staleness + version + 1
        if self._num_batches is not None:
            num_batches = min(num_batches, self._num_batches)
        allowed = num_batches * self._batch_size
        return min(by_concurrency, allowed - counts.accepted - counts.running)

    def expect_batches(self, num_batches: int) -> None:
        with self._lock:
            self._num_batches = num_batches

    def enqueue(self) -> None:
        self._add(enqueued=1)

    def start(self) -> None:
        self._add(enqueued=-1, running=1)

    def accept(self) -> None:
        self._add(running=-1, accepted=1)

    def reject(self) -> None:
        self._add(running=-1, rejected=1)

    def give_back(self) -> None:
        """An accepted group became too old. It now counts as rejected; otherwise the learner would wait forever."""
        self._add(accepted=-1, rejected=1)

    def forfeit(self, num_groups: int) -> None:
        """The learner took a batch with ``num_groups`` groups too few. Their places count as used."""
        self._add(accepted=num_groups)

    def recover(self, version: int, num_buffered: int = 0, num_rejected: int = 0) -> None:
        """After a restart, the groups of earlier batches and those in the checkpoint count as accepted."""
        accepted = version * self._batch_size + num_buffered
        with self._lock:
            self._counts = replace(self._counts, accepted=accepted, rejected=num_rejected)

    def _add(self, *, enqueued: int = 0, running: int = 0, accepted: int = 0, rejected: int = 0) -> None:
        with self._lock:
            counts = RolloutCounts(
                self._counts.enqueued + enqueued,
                self._counts.running + running,
                self._counts.accepted + accepted,
                self._counts.rejected + rejected,
            )
            if counts.enqueued < 0 or counts.running < 0:
                raise ValueError(f"a rollout started or ended that was not counted before: {counts}")
            self._counts = counts
