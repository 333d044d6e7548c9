"""Rollouts that are not trained on yet, as a checkpoint stores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headwater.core.errors import RunError
from headwater.core.media import MediaContent
from headwater.core.records import Trajectory
from headwater.data.json_safe import from_json_safe, to_json_safe
from headwater.observe.media_store import media_to_json, placed_from_json
from headwater.rollout.flight import Dispatch, requests_from_json, requests_to_json
from headwater.rollout.group import Group, PromptDraw, UnreadableRow
from headwater.rollout.ledger import LedgerCounts
from headwater.rollout.staleness import Finished, RolloutCounts

DrawAgain = Callable[[int, int], PromptDraw]
"""From ``(index, epoch)`` to the draw that was made there."""
ReadContent = Callable[[Mapping[str, Any]], MediaContent]
"""From the record of an image or video (``MediaStore``) to its content."""
_MEDIA = "media"


@dataclass(frozen=True)
class RolloutSnapshot:
    cursor: Mapping[str, Any]
    """The position of the next prompt."""
    ledger: Mapping[str, Any]
    in_flight: tuple[Dispatch, ...] = ()
    """Running or waiting to start; these start again."""
    finished: tuple[Finished, ...] = ()
    """Complete groups; these are kept. One whose row can no longer be read is ``in_flight`` after ``from_json``."""

    def contents(self) -> list[MediaContent]:
        """The images and videos of the complete groups. ``to_json`` has only their digests, so store them beside it."""
        trajectories = (each for finished in self.finished for each in finished.group.trajectories)
        found = (item.content for each in trajectories for item in each.media)
        return list({content.digest: content for content in found}.values())

    def to_json(self) -> str:
        return json.dumps(
            {
                "cursor": self.cursor,
                "ledger": self.ledger,
                "in_flight": [_dispatch_to_json(each) for each in self.in_flight],
                "finished": [_finished_to_json(each) for each in self.finished],
            }
        )

    @classmethod
    def from_json(
        cls,
        text: str,
        again: DrawAgain,
        content_of: ReadContent | None = None,
        *,
        use_cursor: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> RolloutSnapshot:
        """``content_of`` gives the contents back that were stored; a snapshot without media needs none.

        ``use_cursor`` receives the cursor before ``again`` draws from the data, and may refuse them.
        """
        read = json.loads(text)
        if use_cursor is not None:
            use_cursor(read["cursor"])
        in_flight = [_dispatch_from_json(each, again) for each in read["in_flight"]]
        finished = []
        for each in read["finished"]:
            dispatch = _dispatch_from_json(each["dispatch"], again)
            if isinstance(dispatch.draw.row, UnreadableRow):
                # A group cannot do without its prompt. It starts again, so that its row is dropped as any unreadable
                # one, with its reason in the ledger.
                in_flight.append(dispatch)
            else:
                finished.append(_finished_from_json(each, dispatch, content_of))
        return cls(read["cursor"], read["ledger"], tuple(in_flight), tuple(finished))


@dataclass(frozen=True)
class Books:
    """The state of a run's rollouts at one moment. A run that resumes from ``snapshot`` continues exactly where
    ``ended`` stops, so every dispatch ends exactly once in the run directory."""

    snapshot: RolloutSnapshot
    counts: LedgerCounts
    ended: Mapping[str, Any]
    """Dispatches that were trained on or dropped since the previous ``Books``."""
    rollouts: RolloutCounts | None = None
    """The counts that decide how many groups may start; None for a replay, which starts the recorded ones."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped in the whole run, by ``DropKind``."""


def _dispatch_to_json(dispatch: Dispatch) -> dict[str, int]:
    draw = dispatch.draw
    if draw.index < 0:
        raise RunError(f"row {draw.uid}: was not drawn from a dataset, so a checkpoint cannot restore it")
    return {"id": dispatch.id, "index": draw.index, "epoch": draw.epoch, "attempt": dispatch.attempt}


def _dispatch_from_json(read: Mapping[str, int], again: DrawAgain) -> Dispatch:
    return Dispatch(read["id"], again(read["index"], read["epoch"]), read["attempt"])


def _finished_to_json(finished: Finished) -> dict[str, Any]:
    return {
        "dispatch": _dispatch_to_json(finished.dispatch),
        "version": finished.version,
        "oldest": finished.oldest,
        "requests": requests_to_json(finished.requests),
        "baseline": finished.group.baseline,
        "num_lost": finished.group.num_lost,
        "trajectories": [_trajectory_to_json(each) for each in finished.group.trajectories],
    }


def _trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    names = [field.name for field in fields(Trajectory) if field.init and field.name != _MEDIA]
    media = {_MEDIA: media_to_json(trajectory.media)} if trajectory.media else {}
    return {**{name: to_json_safe(getattr(trajectory, name)) for name in names}, **media}


def _trajectory_from_json(read: Mapping[str, Any], content_of: ReadContent | None) -> Trajectory:
    values = {name: from_json_safe(value) for name, value in read.items() if name != _MEDIA}
    records = read.get(_MEDIA, ())
    if records and content_of is None:
        raise RunError("a rollout of the checkpoint has images or videos, and no record says where they are stored")
    media = tuple(placed_from_json(each, content_of(each)) for each in records if content_of is not None)
    return Trajectory(**values, media=media)


def _finished_from_json(read: Mapping[str, Any], dispatch: Dispatch, content_of: ReadContent | None) -> Finished:
    trajectories = tuple(_trajectory_from_json(each, content_of) for each in read["trajectories"])
    requests = requests_from_json(read["requests"])
    group = Group(dispatch.draw.prompt, trajectories, read["baseline"], read["num_lost"])
    return Finished(dispatch, group, read["version"], read["oldest"], requests)
