"""A learner over several ranks: batches are split by cost, and results are put back in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from headwater.cluster.turns import Activity
from headwater.config.schema import Config
from headwater.core.data_proto import DataProto
from headwater.core.dispatch import collect, dispatch
from headwater.core.errors import RankFailed
from headwater.core.learner import LearnerStatus, ProfileOrder, RankStatus, Role
from headwater.core.parcels import Content, Parcel, SendOrder, SendReport
from headwater.core.protocols import Bucket
from headwater.learner.partition import balanced_parts, imbalance
from headwater.learner.rank_files import clear_reports, wait_for_ranks


class RankCalls(Protocol):
    """Calls the same method of every rank's learner at the same time."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def failure(self) -> str:
        """Why the ranks cannot be called any more; empty while they can."""
        ...

    def activity(self) -> Activity:
        """What the ranks are doing. Asked from any thread, also while they execute a call."""
        ...

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The result of every rank. ``arguments`` has one entry per rank."""
        ...

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        """The items of rank 0's iterator, while the other ranks iterate along and discard theirs."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RanksWriting:
    """A checkpoint that the ranks write in the background."""

    folder: Path
    ranks: RankCalls

    def write(self) -> None:
        """Wait until the first rank has put the model together, which it does when all ranks have written.

        If a rank ends, the caller removes the folder, and the others give up as well.
        """
        wait_for_ranks(self.folder, [0], self._check)
        clear_reports(self.folder)

    def _check(self) -> None:
        if self.ranks.failure:
            raise RankFailed(f"{self.folder.name.lstrip('.')} is incomplete: {self.ranks.failure}")


def peak_memory(ranks: Sequence[RankStatus]) -> dict[str, float]:
    """The most memory that ranks have used, in GiB."""
    peaks = [each.peak_memory_bytes / 2**30 for each in ranks]
    return {"ranks/memory_peak_gib_mean": sum(peaks) / len(peaks), "ranks/memory_peak_gib_max": max(peaks)}


class LearnerGroup:
    """The ``Learner`` of the trainer. It knows the ranks' learners only through their calls.

    The process of the trainer may be rank 0 or no rank at all.
    """

    def __init__(self, config: Config, ranks: RankCalls) -> None:
        """``ranks`` must hold their learners already."""
        self._config = config
        self._ranks = ranks
        self._shapes: dict[Role, Mapping[str, tuple[int, ...]]] = {}
        self._parcels: dict[Content, Sequence[Parcel]] = {}
        self.connected: SendOrder | None = None
        self._status = self._read_status()

    def compute(self, batch: DataProto, what: Sequence[str]) -> dict[str, Tensor]:
        parts = self._parts(batch)
        results = self._ranks.call("compute", self._for_ranks((part, list(what)) for part in parts))
        results = results[:: self._config.learner.context_parallel]
        returned = [part.with_columns(tensors=columns) for part, columns in zip(parts, results, strict=True)]
        joined = collect(returned)
        return {name: joined.batch[name] for name in results[0]}

    def update(self, batch: DataProto) -> dict[str, float]:
        rows = balanced_parts(batch, self._num_parts, num_minibatches=self._config.learner.num_minibatches)
        stats = self._first("update", self._for_ranks((part,) for part in dispatch(batch, rows)))
        return stats | imbalance(batch, rows) | peak_memory(self._status.ranks)

    def supervise(self, batch: DataProto) -> dict[str, float]:
        return self._first("supervise", self._for_ranks((part,) for part in self._parts(batch)))

    def keep_reference(self, folder: Path) -> None:
        self._everywhere("keep_reference", folder.absolute())

    def export(self, role: Role = "policy") -> Iterator[Bucket]:
        return self._ranks.stream("export", role)

    def shapes(self, role: Role = "policy") -> Mapping[str, tuple[int, ...]]:
        if role not in self._shapes:
            self._shapes[role] = self._ranks.call("shapes", self._same(role))[0]
        return self._shapes[role]

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        return self._ranks.stream("export_unmerged", adapters_alone)

    def unmerged_shapes(self, adapters_alone: bool) -> Mapping[str, tuple[int, ...]]:
        shapes: list[Mapping[str, tuple[int, ...]]] = self._ranks.call("unmerged_shapes", self._same(adapters_alone))
        return shapes[0]

    def parcels(self, content: Content = "merged") -> Sequence[Parcel]:
        if content not in self._parcels:
            self._parcels[content] = self._ranks.call("parcels", self._same(content))[0]
        return self._parcels[content]

    def connect(self, order: SendOrder) -> list[SendReport]:
        return self._on_all("connect", order)

    def broadcast(self, order: SendOrder, content: Content = "merged") -> list[SendReport]:
        return self._on_all("broadcast", order, content)

    def _on_all(self, name: str, order: SendOrder, *arguments: Any) -> list[SendReport]:
        """The report of every rank. The ranks are members of the group if all of them are."""
        self.connected = None
        reports = [report for each in self._ranks.call(name, self._same(order, *arguments)) for report in each]
        if not any(report.failure for report in reports):
            self.connected = order
        return reports

    def checksum(self, role: Role = "policy") -> str:
        """Every rank gathers one weight after the other and computes the same text."""
        text: str = self._ranks.call("checksum", self._same(role))[0]
        return text

    def save(self, folder: Path) -> None:
        self._everywhere("save", folder.absolute())

    def prepare_snapshot(self) -> None:
        self._ranks.call("prepare_snapshot", self._same())

    def snapshot(self, folder: Path) -> RanksWriting | None:
        """The ranks begin to write at once, each its own files. None if one has too little memory for a copy."""
        folder = folder.absolute()
        started = self._ranks.call("start_snapshot", self._same(folder))
        return RanksWriting(folder, self._ranks) if all(started) else None

    def load(self, folder: Path) -> None:
        self._everywhere("load", folder.absolute())

    def profile(self, order: ProfileOrder | None) -> None:
        self._everywhere("profile", order)

    def prepare_offload(self) -> None:
        self._everywhere("prepare_offload")

    def offload(self) -> None:
        self._everywhere("offload")

    def onload(self) -> None:
        self._everywhere("onload")

    def status(self) -> LearnerStatus:
        """As of the last call that changed it: other threads ask, and the ranks execute one call at a time."""
        now = self._ranks.activity()
        ranks = tuple(now.of(each) for each in self._status.ranks)
        return replace(self._status, failure=self._ranks.failure, ranks=ranks)

    def close(self) -> None:
        self._ranks.close()

    def _parts(self, batch: DataProto) -> list[DataProto]:
        return dispatch(batch, balanced_parts(batch, self._num_parts))

    @property
    def _num_parts(self) -> int:
        return self._ranks.num_ranks // self._config.learner.context_parallel

    def _for_ranks(self, arguments: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Neighbouring ranks compute the same part together."""
        return [each for each in arguments for _ in range(self._config.learner.context_parallel)]

    def _first(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> dict[str, float]:
        """Statistics are sums over all ranks, so every rank returns the same."""
        result: dict[str, float] = self._ranks.call(name, arguments)[0]
        self._status = self._read_status()
        return result

    def _everywhere(self, name: str, *arguments: Any) -> None:
        self._ranks.call(name, self._same(*arguments))
        self._status = self._read_status()

    def _same(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * self._ranks.num_ranks

    def _read_status(self) -> LearnerStatus:
        """The status of the first rank, with the largest memory of all ranks."""
        statuses: list[LearnerStatus] = self._ranks.call("status", self._same())
        ranks = tuple(each for status in statuses for each in status.ranks)
        most = {
            name: max(getattr(each, name) for each in statuses)
            for name in ("memory_bytes", "recorded_bytes", "pass_tokens", "forward_pass_tokens")
        }
        return replace(statuses[0], **most, ranks=ranks)
