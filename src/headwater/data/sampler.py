"""The order in which rows are drawn: a new permutation every epoch, resumable from a few numbers.

>>> sampler = ShufflingSampler(num_rows=3, seed=0, shuffle=False)
>>> [(draw.index, draw.epoch) for draw in sampler.take(4)]
[(0, 0), (1, 0), (2, 0), (0, 1)]
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError
from headwater.data.digest import REMEDY


@dataclass(frozen=True, slots=True)
class Draw:
    """Row ``index`` of the dataset, drawn in epoch ``epoch``."""

    index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DataPart:
    """The rows ``start`` to ``stop`` of a dataset, which come from one source."""

    name: str
    start: int
    stop: int
    weight: float | None = None
    """Its share of the draws, relative to those of other parts; None if nothing has a weight."""


class Sampler(Protocol):
    """An endless stream of draws."""

    def take(self, count: int) -> list[Draw]: ...
    def peek(self, count: int) -> list[Draw]:
        """What ``take`` would return now. The position in the stream does not change."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ShufflingSampler:
    """An endless stream of draws that depends only on ``seed`` and ``num_rows``, not on the sizes of the takes."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True, *, stream: int = 0) -> None:
        """Samplers with another ``stream`` have other orders."""
        if num_rows < 1:
            raise DataError(f"sampler: num_rows = {num_rows}; must be >= 1, an empty dataset has no order")
        if seed < 0:
            raise DataError(f"sampler: seed = {seed}; must be >= 0")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._stream = stream
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

    def peek(self, count: int) -> list[Draw]:
        return copy.copy(self).take(count)

    @property
    def epoch(self) -> int:
        """Complete passes over the rows."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
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
            ("num_rows", f"the rows of data.train, their filter or the tokenizer changed since; {REMEDY}"),
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
        entropy = (self.seed, epoch, self._stream) if self._stream else (self.seed, epoch)
        bits = np.random.MT19937(np.random.SeedSequence(entropy))
        return np.random.RandomState(bits).permutation(self.num_rows)


class MixingSampler:
    """Draws from several parts of a dataset in proportion to their weights, each in its own order and epochs.

    The next draw is from the part that is furthest behind. So after any number of draws, the count of a part is less
    than one above its exact share. It is less than one below it with two parts, and less than n - 1 with n parts.

    >>> parts = [DataPart("a", 0, 2, weight=3), DataPart("b", 2, 4, weight=1)]
    >>> [draw.index for draw in MixingSampler(parts, seed=0, shuffle=False).take(8)]
    [0, 1, 2, 0, 1, 0, 3, 1]
    """

    def __init__(self, parts: Sequence[DataPart], seed: int, shuffle: bool = True) -> None:
        total = sum(part.weight or 1.0 for part in parts)
        self._parts = parts
        self._shares = [(part.weight or 1.0) / total for part in parts]
        self._samplers = [
            ShufflingSampler(part.stop - part.start, seed, shuffle, stream=number)
            for number, part in enumerate(parts, start=1)
        ]
        self.counts = [0] * len(parts)
        """Draws from each part."""

    @property
    def epochs(self) -> list[int]:
        return [sampler.epoch for sampler in self._samplers]

    def take(self, count: int) -> list[Draw]:
        draws = []
        for _ in range(count):
            number = sum(self.counts) + 1
            behind = [share * number - drawn for share, drawn in zip(self._shares, self.counts, strict=True)]
            chosen = behind.index(max(behind))
            (draw,) = self._samplers[chosen].take(1)
            draws.append(Draw(self._parts[chosen].start + draw.index, draw.epoch))
            self.counts[chosen] += 1
        return draws

    def peek(self, count: int) -> list[Draw]:
        ahead = copy.copy(self)
        ahead._samplers, ahead.counts = [copy.copy(each) for each in self._samplers], list(self.counts)
        return ahead.take(count)

    def state_dict(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self._samplers]
        return {
            "parts": [
                {"name": part.name, "share": share, "drawn": drawn, **state}
                for part, share, drawn, state in zip(self._parts, self._shares, self.counts, states, strict=True)
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("parts", [])
        mixed = [(part.name, share) for part, share in zip(self._parts, self._shares, strict=True)]
        if [(each["name"], each["share"]) for each in saved] != mixed:
            raise DataError(
                "sampler state: the sources of data.train or their weights have changed since the checkpoint; set them "
                "back, or start a new run from its model"
            )
        for sampler, each in zip(self._samplers, saved, strict=True):
            sampler.load_state_dict(each)
        self.counts = [each["drawn"] for each in saved]
