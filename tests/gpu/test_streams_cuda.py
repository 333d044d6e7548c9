"""The engine's own CUDA stream: it computes beside other threads, and weights cross from one stream to the other."""

from __future__ import annotations

import pytest
import torch
from engine.engine_parts import LIMIT_S, bits, request, tokens_of
from tiny import tokenizer

from headwater.config.schema import EngineConfig
from headwater.core.errors import WeightsIncomplete
from headwater.core.protocols import WeightUpdate
from headwater.engine.engine import Engine
from headwater.models.checksum import checksum
from headwater.models.load import load_model

ASKED = [request(tokens_of(20 + key), key, max_new_tokens=40) for key in range(12)]
CONFIG = EngineConfig(deterministic=True, kv_cache_gib=0.5, max_sequences=16)
SECOND = 2_000_000_000
"""About as many cycles as a GPU makes in a second."""


def cuda_model(seed=0):
    return load_model("tiny:qwen3", dtype="float32", device="cuda", seed=seed)


@pytest.fixture
def engine_of():
    engines = []

    def make(seed=0, *, own_stream=True):
        engines.append(Engine(cuda_model(seed), tokenizer(), CONFIG, own_stream=own_stream))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def busy(seconds):
    """Occupy the default stream. Returns an event that comes after it."""
    done = torch.cuda.Event()
    for _ in range(int(10 * seconds)):
        torch.cuda._sleep(SECOND // 10)
    done.record()
    return done


def test_the_engine_generates_while_the_default_stream_is_busy(engine_of):
    engine = engine_of()
    for _ in range(3):  # captures the graphs of all row counts; from the second time, prompts are found in the cache
        expected = bits(engine.generate(ASKED))
    done = busy(10)
    assert bits(engine.generate(ASKED)) == expected
    assert not done.query(), "the engine has waited for the default stream"
    done.synchronize()


def test_the_same_bits_on_a_shared_stream_and_beside_other_work(engine_of):
    alone = bits(engine_of(own_stream=False).generate(ASKED))
    engine = engine_of()
    assert bits(engine.generate(ASKED)) == alone
    work = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        work = (work @ work).tanh()
    assert bits(engine.generate(ASKED)) == alone
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["interrupt", "in_flight", "drain"])
def test_weights_that_are_still_being_computed_arrive_complete(engine_of, mode):
    """They are written after a second of other work, and overwritten as soon as the engine has taken them."""
    new = dict(cuda_model(1).named_parameters())
    expected = checksum((name, each.detach()) for name, each in new.items())
    engine, source = engine_of(), {name: torch.full_like(each, torch.nan) for name, each in new.items()}
    engine.generate(ASKED[:2])
    torch.cuda.synchronize()
    busy(1)
    for name, each in source.items():
        each.copy_(new[name].detach())
    engine.update_weights(WeightUpdate.of(1, source.items()), mode).result(LIMIT_S)
    for each in source.values():
        each.fill_(torch.nan)
    assert engine.weights_checksum() == expected
    assert bits(engine.generate(ASKED)) == bits(engine_of(1).generate(ASKED))


def test_an_update_from_another_stream_is_ordered_after_that_stream(engine_of):
    new = dict(cuda_model(1).named_parameters())
    source = {name: torch.full_like(each, torch.nan) for name, each in new.items()}
    engine, stream = engine_of(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(1)
        for name, each in source.items():
            each.copy_(new[name].detach())
        engine.update_weights(WeightUpdate.of(1, source.items())).result(LIMIT_S)
    assert engine.weights_checksum() == checksum((name, each.detach()) for name, each in new.items())


def test_memory_that_sleep_releases_may_be_used_at_once(engine_of):
    engine = engine_of()
    expected, sum_before = bits(engine.generate(ASKED)), engine.weights_checksum()
    for _ in range(3):
        engine.sleep()
        held = [torch.full((2**26,), torch.nan, device="cuda") for _ in range(8)]
        del held
        engine.wake()
        assert engine.weights_checksum() == sum_before
        assert bits(engine.generate(ASKED)) == expected
    broken = [(name, torch.full_like(each, torch.nan)) for name, each in cuda_model(1).named_parameters()]
    with pytest.raises(WeightsIncomplete):
        engine.update_weights(WeightUpdate.of(1, broken)).result(LIMIT_S)
    engine.update_weights(WeightUpdate.of(2, cuda_model(0).named_parameters())).result(LIMIT_S)
    assert bits(engine.generate(ASKED)) == expected


def test_memory_of_a_closed_engine_may_be_used_at_once(engine_of):
    expected = bits(engine_of().generate(ASKED))
    for _ in range(3):
        engine = Engine(cuda_model(), tokenizer(), CONFIG)
        engine.generate(ASKED[:3])
        engine.close()
        del engine
        held = [torch.full((2**24,), torch.nan, device="cuda") for _ in range(16)]
        del held
    assert bits(engine_of().generate(ASKED)) == expected
