"""The order in which rows are drawn: a new permutation every epoch, resumable from a few numbers.

>>> sampler = ShufflingSampler(num_rows=3, seed=0, shuffle=False)
>>> [(draw.index, draw.epoch) for draw in sampler.take(4)]
[(0, 0), (1, 0), (2, 0), (0, 1)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Draw:
    """Row ``index`` of the dataset, drawn in epoch ``epoch``."""

    index: int
    epoch: int


class ShufflingSampler:
    """An endless stream of draws that depends only on ``seed`` and ``num_rows``, not on the sizes of the takes."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True) -> None:
        if num_rows < 1:
            raise DataError(f"sampler: num_rows = {num_rows}; must be >= 1, an empty dataset has no order")
        if seed < 0:
            raise DataError(f"sampler: seed = {seed}; must be >= 0")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Draw]:
        """The next ``count`` draws. They may cross the end of an epoch."""
        if count < 0:
            raise ValueError(f"count = {count}: must be >= 0")
        draws: list[Draw] = []
        while len(draws) < count:
            stop = min(self._position + count - len(draws), self.num_rows)
            draws += [Draw(int(index), self._epoch) for index in self._order[self._position : stop]]
            if stop == self.num_rows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            else:
                self._position = stop
        return draws

    def state_dict(self) -> dict[str, int | bool]:
        """The position in the stream. Its size does not depend on the dataset."""
        return {
            "seed": self.seed,
            "num_rows": self.num_rows,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that ``state_dict`` recorded."""
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise DataError(
                f"sampler state: {', '.join(missing)} missing; the checkpoint is damaged or has another format"
            )
        for key, remedy in (
            ("num_rows", "the data, its filter or the tokenizer changed since the checkpoint"),
            ("seed", "set run.seed to the checkpoint's"),
            ("shuffle", "set data.shuffle to the checkpoint's"),
        ):
            if state[key] != getattr(self, key):
                raise DataError(
                    f"sampler state: {key} = {state[key]} in the checkpoint, {getattr(self, key)} now; {remedy}"
                )
        if state["epoch"] < 0 or not 0 <= state["position"] < self.num_rows:
            where = f"epoch = {state['epoch']}, position = {state['position']}"
            raise DataError(f"sampler state: {where} with {self.num_rows} rows; the checkpoint is damaged")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_rows)
        # numpy guarantees a stable stream for RandomState, not for Generator: a resumed run keeps its order.
        bits = np.random.MT19937(np.random.SeedSequence((self.seed, epoch)))
        return np.random.RandomState(bits).permutation(self.num_rows)
