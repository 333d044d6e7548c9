"""The outcome of every dispatched prompt: nothing is lost, and nothing is counted twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headwater.core.errors import RunError
from headwater.core.records import DropKind
from headwater.rollout.flight import Dispatch, Requests, requests_to_json
from headwater.rollout.group import PromptDraw

State = Literal["in_flight", "buffered"]


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    dispatched: int
    trained: int
    dropped: int
    buffered: int
    """Finished, and waiting for the learner."""
    in_flight: int
    """Running, or waiting to start."""

    @property
    def is_balanced(self) -> bool:
        return self.dispatched == self.trained + self.dropped + self.buffered + self.in_flight


class Ledger:
    """Follows every dispatch from its start to its single end. Thread-safe.

        dispatch = ledger.dispatch(draw)
        ledger.finish(dispatch.id)                    # all samples are complete
        ledger.train(dispatch.id, requests)           # or: ledger.drop(dispatch.id, DropKind.STALE, "too old")

    Dispatches that have ended since the last ``take_record`` are kept for the run directory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Dispatch, State]] = {}
        self._next_id = 0
        self._num_trained = 0
        self._drops: Counter[DropKind] = Counter()
        self._messages: dict[DropKind, str] = {}
        """The last message of each kind, for the status file."""
        self._trained: list[dict[str, Any]] = []
        self._dropped: list[dict[str, Any]] = []

    def dispatch(self, draw: PromptDraw, attempt: int = 0) -> Dispatch:
        with self._lock:
            dispatch = Dispatch(self._next_id, draw, attempt)
            self._next_id += 1
            self._open[dispatch.id] = dispatch, "in_flight"
        return dispatch

    def finish(self, id: int) -> None:
        with self._lock:
            self._open[id] = self._expect(id, "in_flight", "finished"), "buffered"

    def train(self, id: int, requests: Requests) -> None:
        """``requests`` records which policy versions produced the tokens. A replay of the run needs it."""
        with self._lock:
            dispatch = self._expect(id, "buffered", "trained on")
            del self._open[id]
            self._num_trained += 1
            self._trained.append({**_describe(dispatch), "requests": requests_to_json(requests)})

    def drop(self, id: int, kind: DropKind, message: str) -> None:
        """End a dispatch that is not trained on, whether it has finished or not."""
        with self._lock:
            if id not in self._open:
                raise RunError(f"ledger: dispatch {id} cannot be dropped: it has already ended")
            dispatch, _ = self._open.pop(id)
            self._drops[kind] += 1
            self._messages[kind] = message
            self._dropped.append({**_describe(dispatch), "kind": kind.value, "message": message})

    def counts(self) -> LedgerCounts:
        with self._lock:
            states = Counter(state for _, state in self._open.values())
            return LedgerCounts(
                self._next_id,
                self._num_trained,
                self._drops.total(),
                buffered=states["buffered"],
                in_flight=states["in_flight"],
            )

    def drops(self) -> dict[str, dict[str, Any]]:
        """By kind: how many groups were dropped in this run, and the last message of the kind."""
        with self._lock:
            return {
                kind.value: {"count": count, "message": self._messages.get(kind, "")}
                for kind, count in self._drops.most_common()
            }

    def check(self, *, num_buffered: int, num_in_flight: int) -> LedgerCounts:
        """The counts, compared with the groups that actually exist. A difference is an error: the run must stop."""
        counts = self.counts()
        if not counts.is_balanced or (counts.buffered, counts.in_flight) != (num_buffered, num_in_flight):
            raise RunError(
                f"ledger does not balance: {asdict(counts)}, but {num_buffered} groups are buffered and "
                f"{num_in_flight} in flight; this is a bug, please report it with the run's ledger.jsonl"
            )
        return counts

    def take_record(self) -> dict[str, Any]:
        """Dispatches that have ended since the last call."""
        with self._lock:
            record = {"trained": self._trained, "dropped": self._dropped}
            self._trained, self._dropped = [], []
            return record

    # For checkpoints

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            drops = {kind.value: count for kind, count in self._drops.items()}
            return {"next_id": self._next_id, "trained": self._num_trained, "drops": drops}

    def load_state_dict(
        self, state: Mapping[str, Any], *, in_flight: Iterable[Dispatch], buffered: Iterable[Dispatch]
    ) -> None:
        with self._lock:
            self._next_id, self._num_trained = state["next_id"], state["trained"]
            self._drops = Counter({DropKind(kind): count for kind, count in state["drops"].items()})
            self._open = {each.id: (each, "in_flight") for each in in_flight}
            self._open |= {each.id: (each, "buffered") for each in buffered}

    def _expect(self, id: int, state: State, event: str) -> Dispatch:
        dispatch, current = self._open.get(id, (None, None))
        if dispatch is None or current != state:
            known = "has already ended" if dispatch is None else f"is {current}"
            raise RunError(f"ledger: dispatch {id} cannot be {event}: it {known}")
        return dispatch


def _describe(dispatch: Dispatch) -> dict[str, Any]:
    draw = dispatch.draw
    return {"id": dispatch.id, "uid": draw.uid, "index": draw.index, "epoch": draw.epoch}
