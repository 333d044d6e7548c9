"""A learner over several ranks: batches are split by cost, and results are put back in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from headwater.core.data_proto import DataProto
from headwater.core.dispatch import collect, dispatch
from headwater.core.protocols import Bucket, LearnerStatus, Role
from headwater.learner.learner import LocalLearner
from headwater.learner.partition import balanced_parts


class RankCalls(Protocol):
    """Calls the same method of every rank's learner at the same time."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def failure(self) -> str:
        """Why the ranks cannot be called any more; empty while they can."""
        ...

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The result of every rank. ``arguments`` has one entry per rank."""
        ...

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        """The items of rank 0's iterator, while the other ranks iterate along and discard theirs."""
        ...

    def close(self) -> None: ...


class LearnerGroup:
    """The ``Learner`` that rank 0 gives to the trainer."""

    def __init__(self, local: LocalLearner, ranks: RankCalls) -> None:
        """``local`` is the learner of rank 0, which takes part in every call."""
        self._local = local
        self._ranks = ranks

    def compute(self, batch: DataProto, what: Sequence[str]) -> dict[str, Tensor]:
        parts = self._parts(batch)
        results = self._ranks.call("compute", [(part, list(what)) for part in parts])
        returned = [part.with_columns(tensors=columns) for part, columns in zip(parts, results, strict=True)]
        joined = collect(returned)
        return {name: joined.batch[name] for name in results[0]}

    def update(self, batch: DataProto) -> dict[str, float]:
        parts = self._parts(batch, self._local.config.learner.num_minibatches)
        return self._first("update", [(part,) for part in parts])

    def supervise(self, batch: DataProto) -> dict[str, float]:
        return self._first("supervise", [(part,) for part in self._parts(batch)])

    def keep_reference(self, folder: Path) -> None:
        self._everywhere("keep_reference", folder.absolute())

    def export(self, role: Role = "policy") -> Iterator[Bucket]:
        return self._ranks.stream("export", role)

    def shapes(self, role: Role = "policy") -> Mapping[str, tuple[int, ...]]:
        return self._local.shapes(role)

    def save(self, folder: Path) -> None:
        self._everywhere("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._everywhere("load", folder.absolute())

    def offload(self) -> None:
        self._everywhere("offload")

    def onload(self) -> None:
        self._everywhere("onload")

    def status(self) -> LearnerStatus:
        return replace(self._local.status(), failure=self._ranks.failure)

    def close(self) -> None:
        self._ranks.close()

    def _parts(self, batch: DataProto, num_minibatches: int = 1) -> list[DataProto]:
        return dispatch(batch, balanced_parts(batch, self._ranks.num_ranks, num_minibatches=num_minibatches))

    def _first(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> dict[str, float]:
        """Statistics are sums over all ranks, so every rank returns the same."""
        result: dict[str, float] = self._ranks.call(name, arguments)[0]
        return result

    def _everywhere(self, name: str, *arguments: Any) -> None:
        self._ranks.call(name, [arguments] * self._ranks.num_ranks)
