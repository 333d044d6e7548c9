"""Where prompts come from (``PromptStream``), and what the training loop needs of rollouts (``RolloutSource``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headwater.core.randomness import derive_key
from headwater.data.load import PromptDataset
from headwater.data.sampler import ShufflingSampler
from headwater.rollout.group import PromptDraw, RolloutBatch
from headwater.rollout.ledger import Ledger, LedgerCounts
from headwater.rollout.snapshot import Books, RolloutSnapshot


class PromptSource(Protocol):
    def take(self, count: int) -> Sequence[PromptDraw]:
        """The next ``count`` prompts, or fewer if there are no more."""
        ...

    def again(self, index: int, epoch: int) -> PromptDraw:
        """Repeat an earlier draw."""
        ...


class PromptStream:
    """The endless stream of training prompts, in the order of the sampler. Its state is the sampler's state."""

    def __init__(self, dataset: PromptDataset, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._sampler = ShufflingSampler(len(dataset), seed, shuffle)

    def take(self, count: int) -> list[PromptDraw]:
        return [self.again(draw.index, draw.epoch) for draw in self._sampler.take(count)]

    def again(self, index: int, epoch: int) -> PromptDraw:
        """Repeat an earlier draw: the same prompt with the same randomness."""
        prompt = self._dataset[index]
        # The epoch is part of the key, so that a prompt gets new responses in every epoch.
        return PromptDraw(prompt, derive_key(self._seed, "rollout", epoch, prompt.uid), index, epoch)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._sampler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)


class RolloutSource(Protocol):
    """What the training loop needs of rollouts. ``WorkflowExecutor`` generates them, ``ReplayedRollouts`` repeats those
    of a recorded run."""

    ledger: Ledger

    def expect_batches(self, num_batches: int) -> None:
        """The number of batches that the learner will take; no prompt starts for a later one."""
        ...

    def prepare_batch(self, prompts: PromptSource) -> RolloutBatch: ...
    def trained(self, step: int, weights: str) -> None: ...
    def finish_all(self) -> None: ...
    def set_version(self, version: int) -> None: ...
    def check_ledger(self) -> LedgerCounts: ...
    def close_books(self, cursor: Callable[[], Mapping[str, Any]]) -> Books: ...
    def snapshot(self, cursor: Callable[[], Mapping[str, Any]]) -> RolloutSnapshot: ...
    def restore(self, snapshot: RolloutSnapshot, version: int) -> None: ...
    def status(self) -> dict[str, Any]: ...
