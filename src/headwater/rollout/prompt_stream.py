"""The endless stream of training prompts, each with the key of its randomness."""

from __future__ import annotations

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
        draws = []
        for draw in self._sampler.take(count):
            prompt = self._dataset[draw.index]
            # The epoch is part of the key, so a prompt that comes round again is answered anew.
            draws.append(PromptDraw(prompt, derive_key(self._seed, "rollout", draw.epoch, prompt.uid)))
        return draws

    def state_dict(self) -> dict[str, Any]:
        return dict(self._sampler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
