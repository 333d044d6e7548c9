"""Which of the finished groups the learner takes next, and which have become too old for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headwater.rollout.flight import Dispatch, Flight
from headwater.rollout.group import Group
from headwater.rollout.segments import Requests
from headwater.rollout.stale_tokens import oldest_version, without_older


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete group that waits for the learner."""

    dispatch: Dispatch
    group: Group
    version: int
    """The policy when it started."""
    oldest: int | None
    """The oldest policy among its trained tokens; None where none is trained."""
    requests: Requests

    @classmethod
    def of(cls, dispatch: Dispatch, group: Group, flight: Flight) -> Finished:
        return cls(dispatch, group, flight.version, oldest_version(group), flight.requests)


@dataclass(frozen=True, slots=True)
class Selection:
    chosen: Sequence[Finished] = ()
    """In the order in which their prompts were drawn."""
    is_enough: bool = False
    too_old: Sequence[Finished] = ()
    """To be dropped."""
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
) -> Selection:
    """Up to ``num_groups`` groups for the learner at ``version``, those drawn first before others.

    A group is too old when one of its trained tokens is more than ``max_staleness`` versions behind. ``drop`` gives it
    up. ``mask`` takes such tokens out of the loss, and gives up a group that has no other. ``wait`` is not enough until
    none of the ``untaken`` groups (by id, the version they started at; finished or not) can become too old while it
    waits for its turn; should one be all the same, as after a change of settings, it is masked.
    """
    lowest = version - max_staleness
    if len(finished) < num_groups and not may_be_short:
        # At once, and not when a batch is complete: other prompts take their places.
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
            group, num_tokens = without_older(each.group, lowest)
            if oldest_version(group) is None:
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
    """Whether groups that started at these versions can all still be trained on, after the batch of ``version``.

    A group that started at ``m`` must be in a batch no later than that of ``m + max_staleness``, and as many batches as
    there are until then must hold all that are as old or older.
    """
    ordered = sorted(left)
    return all(place < batch_size * max(0, started + max_staleness - version) for place, started in enumerate(ordered))
