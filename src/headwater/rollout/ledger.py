"""What became of every prompt that was dispatched: nothing is lost, and nothing is counted twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headwater.core.errors import RunError
from headwater.rollout.flight import Dispatch
from headwater.rollout.group import PromptDraw
from headwater.rollout.segments import Requests, requests_to_json

State = Literal["in_flight", "buffered"]

_MAX_REASONS = 100
_OTHER_REASONS = "other reasons (see ledger.jsonl)"


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    dispatched: int
    trained: int
    dropped: int
    buffered: int
    """Finished, and waiting to be trained on."""
    in_flight: int
    """Running, or waiting to start."""

    @property
    def is_balanced(self) -> bool:
        return self.dispatched == self.trained + self.dropped + self.buffered + self.in_flight


class Ledger:
    """Follows dispatches from birth to their one end. Safe to use from several threads.

        dispatch = ledger.dispatch(draw)
        ledger.finish(dispatch.id)                    # all samples are there
        ledger.train(dispatch.id, requests)           # or ledger.drop(dispatch.id, "the reward timed out")

    What ended since the last ``take_record`` is kept for the run directory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Dispatch, State]] = {}
        self._next_id = 0
        self._num_trained = 0
        self._reasons: Counter[str] = Counter()
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
        """``requests`` says under which versions its tokens were made: with it the run can be replayed."""
        with self._lock:
            dispatch = self._expect(id, "buffered", "trained on")
            del self._open[id]
            self._num_trained += 1
            self._trained.append({**_describe(dispatch), "requests": requests_to_json(requests)})

    def drop(self, id: int, reason: str) -> None:
        """The end of a dispatch that is not trained on, finished or not."""
        with self._lock:
            if id not in self._open:
                raise RunError(f"ledger: dispatch {id} cannot be dropped: it has ended already")
            dispatch, _ = self._open.pop(id)
            # Reasons may name rows and seconds; a run of weeks must not carry each of them in every checkpoint.
            known = reason in self._reasons or len(self._reasons) < _MAX_REASONS
            self._reasons[reason if known else _OTHER_REASONS] += 1
            self._dropped.append({**_describe(dispatch), "reason": reason})

    def counts(self) -> LedgerCounts:
        with self._lock:
            states = Counter(state for _, state in self._open.values())
            return LedgerCounts(
                self._next_id,
                self._num_trained,
                sum(self._reasons.values()),
                buffered=states["buffered"],
                in_flight=states["in_flight"],
            )

    def drop_reasons(self) -> dict[str, int]:
        with self._lock:
            return dict(self._reasons.most_common())

    def check(self, *, num_buffered: int, num_in_flight: int) -> LedgerCounts:
        """The counts, held against what is really there; a run whose books are wrong must not go on quietly."""
        counts = self.counts()
        if not counts.is_balanced or (counts.buffered, counts.in_flight) != (num_buffered, num_in_flight):
            raise RunError(
                f"ledger does not balance: {asdict(counts)}, but {num_buffered} groups are buffered and "
                f"{num_in_flight} in flight; this is a bug, please report it with the run's ledger.jsonl"
            )
        return counts

    def take_record(self) -> dict[str, Any]:
        """What ended since the last call."""
        with self._lock:
            record = {"trained": self._trained, "dropped": self._dropped}
            self._trained, self._dropped = [], []
            return record

    # For checkpoints

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"next_id": self._next_id, "trained": self._num_trained, "reasons": dict(self._reasons)}

    def load_state_dict(
        self, state: Mapping[str, Any], *, in_flight: Iterable[Dispatch], buffered: Iterable[Dispatch]
    ) -> None:
        with self._lock:
            self._next_id, self._num_trained = state["next_id"], state["trained"]
            self._reasons = Counter(state["reasons"])
            self._open = {each.id: (each, "in_flight") for each in in_flight}
            self._open |= {each.id: (each, "buffered") for each in buffered}

    def _expect(self, id: int, state: State, event: str) -> Dispatch:
        dispatch, current = self._open.get(id, (None, None))
        if dispatch is None or current != state:
            known = "has ended already" if dispatch is None else f"is {current}"
            raise RunError(f"ledger: dispatch {id} cannot be {event}: it {known}")
        return dispatch


def _describe(dispatch: Dispatch) -> dict[str, Any]:
    draw = dispatch.draw
    return {"id": dispatch.id, "uid": draw.prompt.uid, "index": draw.index, "epoch": draw.epoch}
