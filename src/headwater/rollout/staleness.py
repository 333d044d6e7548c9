"""How far generation runs ahead of training: how many groups may start, and which finished ones the learner takes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headwater.rollout.flight import Dispatch, Flight, Requests
from headwater.rollout.group import Group, GroupTimes


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


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete group that waits for the learner."""

    dispatch: Dispatch
    group: Group
    version: int
    """The policy version when the group started."""
    oldest: int | None
    """The oldest policy version among the trained tokens; None if no token is trained."""
    requests: Requests
    times: GroupTimes | None = None
    """None if the group comes from a checkpoint."""

    @classmethod
    def of(cls, dispatch: Dispatch, group: Group, flight: Flight) -> Finished:
        return cls(dispatch, group, flight.version, group.oldest_version(), flight.requests, flight.times)


@dataclass(frozen=True, slots=True)
class Selection:
    chosen: Sequence[Finished] = ()
    """In the order in which the prompts were drawn."""
    is_enough: bool = False
    """Whether the learner can train on ``chosen`` now."""
    too_old: Sequence[Finished] = ()
    """Groups to drop."""
    num_masked_tokens: int = 0


def select(
    finished: Sequence[Finished],
    num_groups: int,
    *,
    version: int,
    max_staleness: int,
    on_stale: Literal["mask", "drop", "wait"],
    untaken: Mapping[int, int],
    may_be_short: bool = False,
    in_order: bool = False,
) -> Selection:
    """Choose up to ``num_groups`` groups for the learner at ``version``, in the order in which they were drawn.

    A group is too old if one of its trained tokens is more than ``max_staleness`` versions behind. ``drop`` discards
    such a group. ``mask`` removes the old tokens from the loss, and discards a group that has no other tokens. ``wait``
    reports the selection as not enough until none of the ``untaken`` groups (id to starting version; finished or
    running) can become too old while it waits. If a group is too old anyway, for example after a change of settings,
    ``wait`` masks it. ``in_order`` chooses no group that was drawn after one that still runs.
    """
    if in_order:
        done = {each.dispatch.id for each in finished}
        first_running = min((id for id in untaken if id not in done), default=None)
        finished = [each for each in finished if first_running is None or each.dispatch.id < first_running]
    lowest = version - max_staleness
    if len(finished) < num_groups and not may_be_short:
        # Drop old groups immediately, before the batch is complete, so that other prompts can take their places.
        gone = (each for each in finished if on_stale == "drop" and each.oldest is not None and each.oldest < lowest)
        return Selection(too_old=tuple(gone))
    chosen: list[Finished] = []
    too_old: list[Finished] = []
    num_masked = 0
    for each in sorted(finished, key=lambda each: each.dispatch.id):
        if len(chosen) == num_groups:
            break
        if each.oldest is not None and each.oldest < lowest:
            if on_stale == "drop":
                too_old.append(each)
                continue
            group, num_tokens = each.group.without_older(lowest)
            if group.oldest_version() is None:
                too_old.append(each)
                continue
            num_masked += num_tokens
            each = replace(each, group=group)
        chosen.append(each)
    is_enough = len(chosen) == num_groups or (may_be_short and bool(chosen))
    if on_stale == "wait" and is_enough:
        taken = {each.dispatch.id for each in chosen}
        left = [started for id, started in untaken.items() if id not in taken]
        is_enough = all_come_in_time(left, num_groups, version=version, max_staleness=max_staleness)
    return Selection(chosen, is_enough, too_old, num_masked)


def all_come_in_time(left: Sequence[int], batch_size: int, *, version: int, max_staleness: int) -> bool:
    """Whether groups that started at these versions can all still be trained on after the batch of ``version``.

    A group that started at version ``m`` must be in the batch of version ``m + max_staleness`` or an earlier one. The
    batches until then must have room for all groups that are as old or older.
    """
    ordered = sorted(left)
    return all(place < batch_size * max(0, started + max_staleness - version) for place, started in enumerate(ordered))
