"""Publishing a policy version, and noticing when something else arrived."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import tiny
import torch

from headwater.backends.hf import HfEngine
from headwater.config.schema import EngineConfig
from headwater.core.errors import RolloutFailed, TransferLost, WeightsError
from headwater.core.protocols import Bucket
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.core.waits import ENGINE_CALL_LIMIT_S, ENGINE_START_LIMIT_S, open_waits
from headwater.engine.engine import Engine
from headwater.models.checksum import checksum
from headwater.models.load import load_model
from headwater.observe.spans import Spans
from headwater.weights.memory import in_buckets
from headwater.weights.publish import StreamChecksums, publish

LIMIT_S = 60.0


class Learner:
    """As much of a learner as publishing needs."""

    def __init__(self, seed: int) -> None:
        self.model = tiny.model(seed)

    def export(self) -> Iterator[Bucket]:
        return in_buckets(((name, each.detach()) for name, each in self.model.named_parameters()), max_bytes=2**14)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self.model.named_parameters()}


def embedded(dtype: str) -> Engine:
    model = load_model("tiny:qwen3", dtype=dtype, device="cpu", seed=0)
    return Engine(model, tiny.tokenizer(), EngineConfig(kv_cache_gib=0.01))


def hf(dtype: str) -> HfEngine:
    model = load_model("tiny:qwen3", dtype=dtype, device="cpu", seed=0)
    return HfEngine(model, tiny.tokenizer(), max_batch_sequences=4, spans=Spans())


@pytest.fixture(params=[embedded, hf])
def make(request):
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_answers_for_the_weights_it_serves(make, dtype):
    engine = make(dtype)
    try:
        untouched = load_model("tiny:qwen3", dtype=dtype, device="cpu", seed=0)
        assert engine.weights_checksum() == checksum(untouched.named_parameters())
        published = publish(Learner(1), engine, 3)
        assert published.serving == engine.weights_checksum() != checksum(untouched.named_parameters())
        assert published.serving == checksum(tiny.model(1).named_parameters(), getattr(torch, dtype))
        assert published.trained == checksum(tiny.model(1).named_parameters())
        assert engine.get_version() == 3
        engine.sleep()
        assert engine.weights_checksum() == published.serving
        engine.wake()
        request = ModelRequest("r", (5, 6), SamplingParams(max_new_tokens=2, ignore_end=True), 0)
        assert asyncio.run(engine.agenerate(request)).output_versions == (3, 3)
    finally:
        engine.close()


def test_weights_that_changed_on_the_way_are_noticed(make):
    engine = make("float32")
    learner = Learner(1)
    taken = engine.update_weights

    def damaged(update):
        done = taken(update)
        done.result(60)
        with torch.no_grad():
            engine._model.model.norm.weight[3] += 1e-6
        return done

    engine.update_weights = damaged
    try:
        with pytest.raises(
            WeightsError, match=r"version 4: the engine serves weights with checksum float32-.* the learner"
        ):
            publish(learner, engine, 4)
    finally:
        engine.close()


def test_weights_are_sent_again_to_the_process_that_replaces_one_that_died():
    engine, num_sent, take = embedded("float32"), [], None
    take = engine.update_weights

    def dies_twice(update):
        num_sent.append(sum(len(bucket) for bucket in update.buckets) if len(num_sent) < 2 else 0)
        if len(num_sent) > 2:
            return take(update)
        return failed("the process ended")

    def failed(why):
        lost: Future[None] = Future()
        lost.set_exception(TransferLost(why))
        return lost

    engine.update_weights = dies_twice
    try:
        published = publish(Learner(1), engine, 3)
        assert num_sent[0] == num_sent[1] == len(list(tiny.model(1).named_parameters())), "each time from the start"
        assert published.serving == engine.weights_checksum()
        del num_sent[:]

        def dies_always(update):
            num_sent.append(1)
            return failed("killed again")

        engine.update_weights = dies_always
        with pytest.raises(RolloutFailed, match=r"version 4 was sent 8 times and lost each time.*killed again"):
            publish(Learner(1), engine, 4)
        assert len(num_sent) == 8
        engine.update_weights = take
    finally:
        engine.close()
    with pytest.raises(RolloutFailed, match="closed"):
        publish(Learner(1), engine, 4)


def test_the_engine_may_take_as_long_as_a_new_process_does():
    assert ENGINE_CALL_LIMIT_S > ENGINE_START_LIMIT_S
    engine, seen = embedded("float32"), []
    take = engine.update_weights

    def take_slowly(update):
        taken, late, before = take(update), Future(), len(seen)

        def look_then_finish():
            deadline = time.monotonic() + LIMIT_S
            while len(seen) == before and time.monotonic() < deadline:
                seen.extend(each.hard_limit_s for each in open_waits() if each.kind == "weights")
            late.set_result(taken.result(LIMIT_S))

        threading.Thread(target=look_then_finish, daemon=True).start()
        return late

    engine.update_weights = take_slowly
    try:
        for longest_s in (0.0, 1.0, 1e6):
            publish(Learner(1), engine, 3, longest_response_s=longest_s)
    finally:
        engine.close()
    assert seen == [ENGINE_CALL_LIMIT_S, ENGINE_CALL_LIMIT_S, 1e6]


def test_the_first_whole_stream_of_several_decides_the_checksums():
    """Servers that take weights one after another read a stream each, and the first one may be lost."""
    learner, expected = Learner(1), checksum(tiny.model(1).named_parameters())
    checksums = StreamChecksums(torch.float32)
    broken = checksums.watch(learner.export())
    next(broken)
    broken.close()
    for _ in range(2):
        assert len(list(checksums.watch(learner.export()))) > 1
        assert checksums.texts() == (expected, expected)
    assert checksums.num_bytes == sum(each.nbytes for each in learner.model.parameters())
