"""The watch of ranks on other machines, which are known only by their signs of life."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from headwater.cluster import watch
from headwater.cluster.watch import RankWatch


@pytest.fixture
def ranks(monkeypatch):
    """Rank 0 and rank 1, each as on its own machine."""
    store, machines = HashStore(), threading.local()
    monkeypatch.setattr(watch, "_machine", lambda: machines.name)

    def start(rank: int) -> RankWatch:
        machines.name = f"machine {rank}"
        return RankWatch(store, rank, 2)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(start, range(2)))
    yield made
    for each in made:
        each.stop()


def test_a_silent_rank_on_another_machine_has_ended_within_a_minute(monkeypatch, ranks):
    assert watch._SILENCE_S + 2 * watch._LOOK_S + 10.0 < 60, "with 10 s for rank 0 to end"
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)
    monkeypatch.setattr(watch, "_SILENCE_S", 1.5)
    first, second = ranks
    has_ended = threading.Event()
    first.on_gone = has_ended.set
    assert not has_ended.wait(1.7), first.gone()
    second.stop()
    began = time.monotonic()
    assert has_ended.wait(60)
    assert time.monotonic() - began > 0.5
    assert first.gone() == "rank 1: no sign of life for 2 s (its process or its machine has ended)"
