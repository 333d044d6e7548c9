"""The learner over several ranks, whose process need not be one of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headwater.cluster.group import LearnerGroup
from headwater.config.schema import Config
from headwater.core.protocols import LearnerStatus


class Rank:
    def __init__(self, number: int) -> None:
        self._number = number

    def offload(self) -> None:
        self._number = 0

    def shapes(self, role: str) -> dict[str, tuple[int, ...]]:
        return {f"{role}.weight": (2, 3)}

    def checksum(self, role: str) -> str:
        return f"float32-{role}"

    def status(self) -> LearnerStatus:
        return LearnerStatus(3, "cuda:0", 0, 0.1, memory_bytes=100 * self._number)


class Calls:
    """The calls of ranks that are elsewhere: this object is all that a group knows of them."""

    def __init__(self) -> None:
        self._ranks = [Rank(number) for number in range(3)]
        self.num_ranks = len(self._ranks)
        self.failure = ""
        self.made: list[str] = []

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.made.append(name)
        return [getattr(rank, name)(*each) for rank, each in zip(self._ranks, arguments, strict=True)]

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        raise NotImplementedError

    def close(self) -> None: ...


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_the_status_is_that_of_the_ranks_with_the_largest_memory(calls):
    group = LearnerGroup(Config(), calls)
    assert group.status() == LearnerStatus(3, "cuda:0", 0, 0.1, memory_bytes=200)
    group.offload()
    assert group.status().memory_bytes == 0


def test_asking_for_the_status_calls_no_rank(calls):
    """The status file asks from another thread, while the ranks may be busy for minutes."""
    group = LearnerGroup(Config(), calls)
    calls.made.clear()
    calls.failure = "rank 1: its process has ended"
    assert group.status().failure == calls.failure
    assert calls.made == []


def test_shapes_are_asked_for_once(calls):
    group = LearnerGroup(Config(), calls)
    calls.made.clear()
    assert [group.shapes("critic"), group.shapes("critic"), group.shapes()] == [
        {"critic.weight": (2, 3)}, {"critic.weight": (2, 3)}, {"policy.weight": (2, 3)}
    ]  # fmt: skip
    assert calls.made == ["shapes", "shapes"]


def test_the_checksum_is_the_one_that_every_rank_computes(calls):
    group = LearnerGroup(Config(), calls)
    assert [group.checksum("critic"), group.checksum()] == ["float32-critic", "float32-policy"]
