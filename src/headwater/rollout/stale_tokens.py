"""The age of a group's tokens, and groups without those that are too old."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, compress

from headwater.core.records import Trajectory
from headwater.rollout.group import Group


def oldest_version(group: Group) -> int | None:
    """The oldest policy version among the tokens that would be trained on; None where there are none."""
    trained = (compress(each.versions, each.loss_mask) for each in group.trajectories)
    return min(chain.from_iterable(trained), default=None)


def without_older(group: Group, version: int) -> tuple[Group, int]:
    """The group with tokens older than ``version`` out of the loss, and how many those are."""
    masked = [_mask(each, version) for each in group.trajectories]
    return replace(group, trajectories=tuple(each for each, _ in masked)), sum(count for _, count in masked)


def _mask(trajectory: Trajectory, version: int) -> tuple[Trajectory, int]:
    pairs = zip(trajectory.loss_mask, trajectory.versions, strict=True)
    mask = tuple(int(trained and made >= version) for trained, made in pairs)
    return replace(trajectory, loss_mask=mask), sum(trajectory.loss_mask) - sum(mask)
