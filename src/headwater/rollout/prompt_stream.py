"""The endless stream of training prompts, each with the key of its randomness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.core.randomness import derive_key
from headwater.data.load import PromptDataset
from headwater.data.sampler import ShufflingSampler
from headwater.rollout.group import PromptDraw


class PromptStream:
    """Draws dataset rows in the sampler's order. Its state is the sampler's: tiny, and exact."""

    def __init__(self, dataset: PromptDataset, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._sampler = ShufflingSampler(len(dataset), seed, shuffle)

    def take(self, count: int) -> list[PromptDraw]:
        return [self.again(draw.index, draw.epoch) for draw in self._sampler.take(count)]

    def again(self, index: int, epoch: int) -> PromptDraw:
        """A draw that was made before: the same prompt with the same randomness."""
        prompt = self._dataset[index]
        # The epoch is part of the key, so a prompt that comes round again is answered anew.
        return PromptDraw(prompt, derive_key(self._seed, "rollout", epoch, prompt.uid), index, epoch)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._sampler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
