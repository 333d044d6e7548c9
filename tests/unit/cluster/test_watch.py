"""The watch of ranks that give no sign of life. Those on other machines are known only by these signs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from patience import long_enough
from torch.distributed import HashStore

from headwater.cluster import watch
from headwater.cluster.watch import RankWatch


@contextmanager
def watched(monkeypatch, num_machines: int = 2) -> Iterator[list[RankWatch]]:
    """Rank 0 and rank 1, each as on its own machine."""
    store, machines = HashStore(), threading.local()
    monkeypatch.setattr(watch, "_machine", lambda: machines.name)

    def start(rank: int) -> RankWatch:
        machines.name = f"machine {rank % num_machines}"
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


def test_a_rank_that_is_silent_although_its_process_lives_is_named(monkeypatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.05)

    def check(quiet_s: float) -> None:
        monkeypatch.setattr(watch, "_QUIET_S", quiet_s)
        with watched(monkeypatch, num_machines=1) as (first, second):
            until(lambda: len(first._silent_s) == 1)
            assert first.quiet() == ""
            second.stop()
            until(first.quiet)
            assert re.fullmatch(r"rank 1: no sign of life for \d+ s \(its process is stopped, .*\)", first.quiet())
            assert not first.gone(), "it may only be suspended, so the limit of its call decides"

    long_enough(check, 1.0, 15.0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
