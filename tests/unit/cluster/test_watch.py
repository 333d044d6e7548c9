"""The watch of ranks on other machines, which are known only by their signs of life."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from patience import long_enough
from torch.distributed import HashStore

from headwater.cluster import watch
from headwater.cluster.watch import RankWatch


@contextmanager
def watched(monkeypatch) -> Iterator[list[RankWatch]]:
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


def test_a_silent_rank_on_another_machine_has_ended_within_a_minute(monkeypatch):
    assert watch._SILENCE_S + 2 * watch._LOOK_S + 10.0 < 60, "with 10 s for rank 0 to end"
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)

    def check(silence_s: float) -> None:
        monkeypatch.setattr(watch, "_SILENCE_S", silence_s)
        with watched(monkeypatch) as (first, second):
            has_ended = threading.Event()
            first.on_gone = has_ended.set
            assert not has_ended.wait(silence_s + 0.2), first.gone()
            second.stop()
            began, began_at = time.monotonic(), time.time()
            assert has_ended.wait(60)
            assert time.monotonic() - began > silence_s / 3
            said = r"rank 1: no sign of life for \d+ s \(its process or its machine has ended\)"
            found = re.fullmatch(rf"{said}, noticed at most (\S+) s later", first.gone())
            assert found
            assert float(found[1]) >= silence_s / 3
            assert began_at - silence_s <= first.ended()[1].alive_at <= time.time() - silence_s / 3

    long_enough(check, 1.5, 15.0)
