"""Rollouts that are not trained on yet, as a checkpoint stores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headwater.core.errors import RunError
from headwater.core.records import Trajectory
from headwater.data.json_safe import from_json_safe, to_json_safe
from headwater.rollout.flight import Dispatch, requests_from_json, requests_to_json
from headwater.rollout.group import Group, PromptDraw
from headwater.rollout.ledger import LedgerCounts
from headwater.rollout.staleness import Finished, RolloutCounts

DrawAgain = Callable[[int, int], PromptDraw]
"""From ``(index, epoch)`` to the draw that was made there."""


@dataclass(frozen=True)
class RolloutSnapshot:
    cursor: Mapping[str, Any]
    """The position of the next prompt."""
    ledger: Mapping[str, Any]
    in_flight: tuple[Dispatch, ...] = ()
    """Running or waiting to start; these start again."""
    finished: tuple[Finished, ...] = ()
    """Complete groups; these are kept."""

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
    def from_json(cls, text: str, again: DrawAgain) -> RolloutSnapshot:
        read = json.loads(text)
        return cls(
            cursor=read["cursor"],
            ledger=read["ledger"],
            in_flight=tuple(_dispatch_from_json(each, again) for each in read["in_flight"]),
            finished=tuple(_finished_from_json(each, again) for each in read["finished"]),
        )


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
        raise RunError(f"row {draw.prompt.uid}: was not drawn from a dataset, so a checkpoint cannot restore it")
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
        "trajectories": [
            {field.name: to_json_safe(getattr(each, field.name)) for field in fields(Trajectory) if field.init}
            for each in finished.group.trajectories
        ],
    }


def _finished_from_json(read: Mapping[str, Any], again: DrawAgain) -> Finished:
    dispatch = _dispatch_from_json(read["dispatch"], again)
    trajectories = tuple(
        Trajectory(**{name: from_json_safe(value) for name, value in each.items()}) for each in read["trajectories"]
    )
    requests = requests_from_json(read["requests"])
    group = Group(dispatch.draw.prompt, trajectories, read["baseline"], read["num_lost"])
    return Finished(dispatch, group, read["version"], read["oldest"], requests)
