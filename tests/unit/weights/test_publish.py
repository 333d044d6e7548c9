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
from headwater.core.errors import WeightsError
from headwater.core.records import ModelRequest, SamplingParams
from headwater.core.waits import ENGINE_CALL_LIMIT_S, ENGINE_START_LIMIT_S, open_waits
from headwater.engine.engine import Engine
from headwater.models.checksum import checksum
from headwater.models.load import load_model
from headwater.observe.spans import Spans
from headwater.weights.publish import publish

LIMIT_S = 60.0


class Learner:
    """As much of a learner as publishing needs."""

    def __init__(self, seed: int) -> None:
        self.model = tiny.model(seed)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield list(self.export_weights())


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
        assert published == engine.weights_checksum() != checksum(untouched.named_parameters())
        assert published == checksum(Learner(1).export_weights(), getattr(torch, dtype))
        assert engine.get_version() == 3
        engine.sleep()
        assert engine.weights_checksum() == published
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


@pytest.mark.parametrize(
    ("limits", "expected_s"),
    [({}, ENGINE_CALL_LIMIT_S), ({"longest_response_s": 1.0}, ENGINE_CALL_LIMIT_S), ({"longest_response_s": 1e6}, 1e6)],
)
def test_the_engine_may_take_as_long_as_a_new_process_does(limits, expected_s):
    assert ENGINE_CALL_LIMIT_S > ENGINE_START_LIMIT_S
    engine, seen = embedded("float32"), []
    take = engine.update_weights

    def take_slowly(update):
        taken, late = take(update), Future()

        def look_then_finish():
            deadline = time.monotonic() + LIMIT_S
            while not seen and time.monotonic() < deadline:
                seen.extend(each.hard_limit_s for each in open_waits() if each.kind == "weights")
            late.set_result(taken.result(LIMIT_S))

        threading.Thread(target=look_then_finish, daemon=True).start()
        return late

    engine.update_weights = take_slowly
    try:
        publish(Learner(1), engine, 3, **limits)
    finally:
        engine.close()
    assert seen == [expected_s]
