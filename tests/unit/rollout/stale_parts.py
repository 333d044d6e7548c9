"""Finished groups of known ages."""

from __future__ import annotations

from rollout.executor_parts import draw_of

from headwater.core.records import Trajectory
from headwater.rollout.flight import Dispatch
from headwater.rollout.group import Group
from headwater.rollout.staleness import Finished


def row(uid: str, versions: tuple[int, ...], mask: tuple[int, ...] | None = None, sample: int = 0) -> Trajectory:
    """A prompt of two tokens and a response made under ``versions``."""
    trained = tuple(int(version >= 0) for version in versions) if mask is None else mask
    count = len(versions)
    return Trajectory(
        uid, sample, (5, 6) + (9,) * count, 2, (0, 0, *trained), (0.0, 0.0) + (-0.5,) * count, (-1, -1, *versions), 1.0,
        "stop",
    )  # fmt: skip


def group_of(number: int, *responses: tuple[int, ...]) -> Group:
    rows = tuple(row(f"row{number}", versions, sample=sample) for sample, versions in enumerate(responses))
    return Group(draw_of(number).prompt, rows)


def finished(number: int, *responses: tuple[int, ...], version: int | None = None) -> Finished:
    """Dispatch ``number``, started at ``version``: where nothing is said, that of its oldest token."""
    group = group_of(number, *responses)
    oldest = group.oldest_version()
    started = version if version is not None else (oldest or 0)
    return Finished(Dispatch(number, draw_of(number)), group, started, oldest, {})
