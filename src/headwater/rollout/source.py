"""Where prompts come from, and where the learner's batches come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headwater.rollout.group import PromptDraw, RolloutBatch
from headwater.rollout.ledger import Ledger, LedgerCounts
from headwater.rollout.snapshot import Books, RolloutSnapshot


class PromptSource(Protocol):
    def take(self, count: int) -> Sequence[PromptDraw]:
        """The next so many prompts; fewer when there are no more."""
        ...

    def again(self, index: int, epoch: int) -> PromptDraw:
        """A draw that was made before."""
        ...


class RolloutSource(Protocol):
    """What the loop asks of rollouts, whether they are generated now (``executor``) or replayed (``replay``)."""

    ledger: Ledger

    def prepare_batch(self, prompts: PromptSource) -> RolloutBatch: ...
    def trained(self, step: int, weights: str) -> None: ...
    def set_version(self, version: int) -> None: ...
    def check_ledger(self) -> LedgerCounts: ...
    def close_books(self, cursor: Callable[[], Mapping[str, Any]]) -> Books: ...
    def snapshot(self, cursor: Callable[[], Mapping[str, Any]]) -> RolloutSnapshot: ...
    def restore(self, snapshot: RolloutSnapshot, version: int) -> None: ...
    def status(self) -> dict[str, Any]: ...
