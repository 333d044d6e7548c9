"""Finished groups: which ones the learner takes next, and which ones have become too old."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headwater.rollout.flight import Dispatch, Flight, Requests
from headwater.rollout.group import Group, GroupTimes


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
