"""One stream of weights for several receivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from patience import long_enough

from headwater.core.errors import TransferLost, WeightsError
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.weights.fan_out import FanOut

SHAPES = {f"w{number}": (2,) for number in range(5)}


class Source:
    """Five buckets, each of which is overwritten when the next one is requested."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.num_read = 0
        self.is_closed = False
        self._fails_at = fails_at

    def update(self) -> WeightUpdate:
        return WeightUpdate(3, SHAPES, self._buckets())

    def _buckets(self) -> Iterator[Bucket]:
        tensor = torch.zeros(2)
        try:
            for number in range(5):
                if number == self._fails_at:
                    raise WeightsError("the learner has failed")
                self.num_read += 1
                tensor.fill_(number)
                yield [(f"w{number}", tensor)]
                tensor.fill_(-1)
        finally:
            self.is_closed = True


def read_all(update: WeightUpdate, pause_s: float = 0.0, stop_at: int = 99) -> list[float]:
    taken = []
    for bucket in update.buckets:
        if len(taken) == stop_at:
            raise TransferLost("killed")
        time.sleep(pause_s)
        taken.append(float(bucket[0][1].sum()) / 2)
    return taken


def start(fan_out: FanOut, threads: ThreadPoolExecutor, **receivers: dict) -> dict[str, Future]:
    futures = {name: threads.submit(read_all, fan_out.update_for(name), **how) for name, how in receivers.items()}
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: fan_out.leave(name))
    return futures


def test_every_receiver_reads_every_bucket_and_the_source_is_read_once():
    source = Source()
    with ThreadPoolExecutor(4) as threads:
        fan_out = FanOut(source.update(), ["a", "b", "c"], start_limit_s=60, bucket_limit_s=60)
        futures = start(fan_out, threads, a={}, b={"pause_s": 0.01}, c={"stop_at": 2})
        assert fan_out.run() == {}
        assert futures["a"].result() == futures["b"].result() == [0, 1, 2, 3, 4]
        with pytest.raises(TransferLost):
            futures["c"].result()
    assert source.num_read == 5
    assert source.is_closed


def test_a_receiver_that_hangs_is_dropped_with_the_reason():
    def check(limit_s: float) -> None:
        hangs = threading.Event()
        source = Source()
        with ThreadPoolExecutor(4) as threads:
            fan_out = FanOut(source.update(), ["a", "b", "never"], start_limit_s=2 * limit_s, bucket_limit_s=limit_s)
            futures = start(fan_out, threads, a={})

            def hang() -> list[float]:
                buckets = iter(fan_out.update_for("b").buckets)
                next(buckets)
                hangs.wait(60)
                return read_all(WeightUpdate(3, SHAPES, buckets))

            late = threads.submit(hang)
            try:
                dropped = fan_out.run()
                assert futures["a"].result() == [0, 1, 2, 3, 4]
                assert sorted(dropped) == ["b", "never"]
                assert "did not take bucket 1 within" in dropped["b"]
            finally:
                hangs.set()
            with pytest.raises(WeightsError, match="b was dropped"):
                late.result()

    long_enough(check, 0.5, 10.0)


def test_a_source_that_fails_fails_for_all_and_without_receivers_nothing_is_read():
    source = Source(fails_at=2)
    with ThreadPoolExecutor(4) as threads:
        fan_out = FanOut(source.update(), ["a", "b"], start_limit_s=60, bucket_limit_s=60)
        futures = start(fan_out, threads, a={}, b={})
        with pytest.raises(WeightsError, match="learner has failed"):
            fan_out.run()
        for future in futures.values():
            with pytest.raises(WeightsError, match="learner has failed"):
                future.result()
    source = Source()
    fan_out = FanOut(source.update(), ["a"], start_limit_s=60, bucket_limit_s=60)
    fan_out.leave("a")
    assert fan_out.run() == {}
    assert source.num_read == 0


def test_a_receiver_that_is_lost_is_not_waited_for():
    source, lost = Source(), {}
    fan_out = FanOut(
        source.update(), ["a", "b"], start_limit_s=300, bucket_limit_s=300, why_lost=lambda name: lost.get(name, "")
    )
    with ThreadPoolExecutor(1) as threads:
        futures = start(fan_out, threads, a={})
        threading.Timer(0.2, lost.update, [{"b": "it hangs"}]).start()
        assert fan_out.run() == {"b": "was lost: it hangs"}
        assert futures["a"].result(300) == [0, 1, 2, 3, 4]
