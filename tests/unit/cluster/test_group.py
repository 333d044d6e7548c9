"""The learner over several ranks, whose process need not be one of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headwater.api import site as sites
from headwater.cluster import torchrun
from headwater.cluster.group import LearnerGroup
from headwater.cluster.torchrun import join
from headwater.cluster.turns import Activity, EndedRank, Turns
from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.core.data_proto import DataProto
from headwater.core.errors import ConfigError
from headwater.core.learner import LearnerStatus, RankStatus
from headwater.learner.ranks import Ranks, allow_waits


class Rank:
    def __init__(self, number: int) -> None:
        self._rank = self._number = number

    def offload(self) -> None:
        self._number = 0

    def shapes(self, role: str) -> dict[str, tuple[int, ...]]:
        return {f"{role}.weight": (2, 3)}

    def checksum(self, role: str) -> str:
        return f"float32-{role}"

    def update(self, part: DataProto) -> dict[str, float]:
        return {"actor/loss": 0.5}

    def status(self) -> LearnerStatus:
        here = RankStatus(self._rank, "node", 70 + self._rank, f"cuda:{self._rank}", (1 + self._rank) * 2**30)
        tokens = {"pass_tokens": 10 - self._rank, "forward_pass_tokens": 40 + self._rank}
        return LearnerStatus(3, "cuda:0", 0, 0.1, memory_bytes=100 * self._number, **tokens, ranks=(here,))


class Calls:
    """The calls of ranks that are elsewhere: this object is all that a group knows of them."""

    def __init__(self) -> None:
        self._ranks = [Rank(number) for number in range(3)]
        self.num_ranks = len(self._ranks)
        self.failure = ""
        self.now = Activity()
        self.made: list[str] = []

    def activity(self) -> Activity:
        return self.now

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
    assert replace(group.status(), ranks=()) == LearnerStatus(
        3, "cuda:0", 0, 0.1, memory_bytes=200, pass_tokens=10, forward_pass_tokens=42
    )
    group.offload()
    assert group.status().memory_bytes == 0


def test_asking_for_the_status_calls_no_rank(calls):
    """The status file asks from another thread, while the ranks may be busy for minutes."""
    group = LearnerGroup(Config(), calls)
    calls.made.clear()
    calls.failure = "rank 1: its process has ended"
    assert group.status().failure == calls.failure
    assert calls.made == []


def test_the_status_says_what_every_rank_is_doing(calls):
    group = LearnerGroup(Config(), calls)
    assert [(each.pid, each.device, each.state) for each in group.status().ranks] == [
        (70 + rank, f"cuda:{rank}", "idle") for rank in range(3)
    ]
    calls.now = Activity("update", 12.3, "compute, 3.1 s", answered={0}, ended={2: EndedRank("killed", 99.5)})
    first, second, third = group.status().ranks
    assert first.state == "has completed update and waits for the others"
    assert (second.state, second.last_call, second.is_alive) == ("executes update for 12 s", "compute, 3.1 s", True)
    assert (third.state, third.is_alive, third.alive_at) == ("ended: killed", False, 99.5)
    assert second.alive_at is None


def test_a_turn_is_remembered_but_not_that_of_the_status():
    turns = Turns(lambda: None)
    with turns.take("update"):
        assert turns.activity().call == "update"
    with turns.take("status"):
        pass
    now = turns.activity()
    assert (now.call, now.last_call.partition(",")[0]) == ("", "update")


def test_an_update_tells_how_evenly_the_ranks_are_loaded_and_how_much_memory_they_used(calls):
    lengths = [8, 8, 8, 2, 2, 2]
    mask = torch.zeros(6, 8, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    uids = np.array([f"prompt {row}" for row in range(6)], dtype=object)
    stats = LearnerGroup(Config(), calls).update(DataProto.from_dict({"attention_mask": mask}, {"uid": uids}))
    assert stats.pop("ranks/imbalance") == pytest.approx(0, abs=1e-9)
    assert stats == {
        "actor/loss": 0.5,
        "ranks/tokens_mean": 10,
        "ranks/tokens_min": 10,
        "ranks/tokens_max": 10,
        "ranks/in_order_tokens_min": 4,
        "ranks/in_order_tokens_max": 16,
        "ranks/memory_peak_gib_mean": 2,
        "ranks/memory_peak_gib_max": 3,
    }


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


def test_ranks_of_torchrun_on_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"--nproc-per-node = 2: .* 4 ranks on several machines.*use cluster=ray"):
        join()


def test_a_call_of_the_ranks_has_the_limit_of_the_settings(monkeypatch):
    class Joined:
        failure = ""

        def build(self, make, spec, *, timeout_s):
            return timeout_s

        def close(self) -> None: ...

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torchrun, "join", Joined)
    monkeypatch.setattr(torchrun, "check_ranks", lambda *_: None)
    monkeypatch.setattr(sites.signal, "signal", lambda *_: None)
    with sites.open_site(load_config("quickstart", ["learner.rank_timeout_s=7"]).config, is_restart=False) as site:
        assert site.make_learner(None) == 7


def test_a_rank_waits_for_the_others_as_long_as_a_call_may_take():
    Ranks().mesh(torch.device("cpu"))  # makes the process group of one rank
    group = dist.group.WORLD
    try:
        for limit_s, expected in ((7.0, 1800.0), (7200.0, 7200.0), (1e30, 365 * 86400.0)):
            allow_waits(limit_s, group)
            assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == expected
    finally:
        allow_waits(0.0, group)
