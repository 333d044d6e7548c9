"""The engine rejects what it cannot do at once, with name and value, and keeps serving."""

from __future__ import annotations

import math

import pytest
from cases import case
from engine.engine_parts import END, collect, make_model, request, run, running, tokens_of
from tiny import tokenizer

from headwater.config.load import load_config
from headwater.config.schema import EngineConfig
from headwater.core.errors import ConfigError, RequestError
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.engine.engine import Engine

GOOD = request(tokens_of(5), 1)


@pytest.fixture(scope="module")
def engine():
    with running() as engine:
        yield engine


def asked(prompt=(7, 8, 9), key=0, **sampling):
    return ModelRequest("mine", tuple(prompt), SamplingParams(**{"max_new_tokens": 4, **sampling}), key)


BAD = {
    "too large": (asked((7, 512)), "token id 512 is outside the vocabulary of 512"),
    "huge": (asked((7, 2**70)), f"token id {2**70} is outside the vocabulary"),
    "negative": (asked((-1,)), "token id -1 is outside the vocabulary"),
    "too long": (
        asked(tokens_of(200), max_new_tokens=57),
        "200 prompt .* 57 new tokens exceed .* 256 positions",
    ),
    "too much to make": (asked(max_new_tokens=10**9), "1000000000 new tokens exceed"),
    "stop token too large": (asked(stop_token_ids=(512,)), "stop token id 512 is outside the vocabulary of 512"),
    "stop token negative": (asked(stop_token_ids=(5, -3)), "stop token id -3 is outside the vocabulary"),
    "early stop token too large": (asked(stop_token_ids=(600,), min_new_tokens=2), "stop token id 600"),
    "too many early stop tokens": (
        asked(stop_token_ids=(5,) * 1025, min_new_tokens=2),
        "1025 stop token ids: at most 1024 are supported with min_new_tokens = 2",
    ),
    "stop token huge": (asked(stop_token_ids=(2**70,)), f"stop token id {2**70}"),
    "too many stop strings": (
        asked(stop_strings=tuple(f"zz{number}q" for number in range(65))),
        "stop_strings: contains 65 texts, and the limit is 64; use fewer",
    ),
    "stop string too long": (
        asked(stop_strings=("a", "b" * 1025)),
        r"stop_strings\[1\] = 'bbb.*'...: has 1025 characters, and the limit is 1024; shorten it",
    ),
    "stop string of half a character": (asked(stop_strings=("a\ud800",)), r"stop_strings\[0\] = .*surrogate pair"),
    "key too large": (asked(key=2**63), f"rng_key = {2**63}"),
    "key too small": (asked(key=-(2**63) - 1), f"rng_key = {-(2**63) - 1}"),
    "top_k too large": (asked(top_k=2**63), f"top_k = {2**63}"),
    "temperature next to nothing": (asked(temperature=1e-40), "temperature = 1e-40"),
    "temperature nothing in float32": (asked(temperature=1e-46), "temperature = 1e-46"),
    "temperature beyond measure": (asked(temperature=1.1e6), r"temperature = 1.1e\+06: must be <= 1e\+06"),
    "temperature infinite in float32": (asked(temperature=1e39, min_new_tokens=1), r"temperature = 1e\+39"),
}


def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_is_served(engine):
    for name, (bad, message) in BAD.items():
        with case(name):
            for call in (
                lambda each: engine.generate([GOOD, each]),
                lambda each: run(engine.agenerate(each)),
                lambda each: run(collect(engine.astream(each))),
                engine.check,
            ):
                with pytest.raises(RequestError, match=f"request mine: .*{message}"):
                    call(bad)
            metrics = engine.metrics()
            assert metrics.num_waiting == metrics.num_running == 0, "GOOD must not have started"
            assert len(engine.generate([GOOD])[0].output_tokens) == 12


def test_what_is_just_within_the_limits_is_served(engine):
    edge = [
        asked((511, 0)),
        asked(tokens_of(200), max_new_tokens=56),
        asked(top_k=2**63 - 1),
        asked(stop_token_ids=(0, 511)),
        asked(stop_strings=tuple(f"zz{number}q" for number in range(64))),
        asked(stop_strings=("€" * 1024,)),
        asked(temperature=1e-6),
        asked(temperature=1e6),
        asked(temperature=1e6, min_new_tokens=2, stop_token_ids=(7,), top_p=0.5),
        asked(min_p=0.999, top_p=1e-9, top_k=1),
        asked(min_new_tokens=4, stop_token_ids=tuple(range(500))),
    ]
    for each, response in zip(edge, engine.generate(edge), strict=True):
        assert 1 <= len(response.output_tokens) <= each.sampling.max_new_tokens
        assert all(math.isfinite(logprob) for logprob in response.output_logprobs)


def test_a_request_that_makes_no_sense_cannot_be_written_down():
    for make, message in [
        (lambda: asked(()), "'mine' has an empty prompt"),
        (lambda: asked(temperature=math.nan), "temperature = nan"),
        (lambda: asked(temperature=math.inf), "temperature = inf"),
        (lambda: asked(temperature=-0.5), "temperature = -0.5"),
        (lambda: asked(top_p=0.0), "top_p = 0.0"),
        (lambda: asked(top_p=math.nan), "top_p = nan"),
        (lambda: asked(min_p=1.0), "min_p = 1.0"),
        (lambda: asked(top_k=-1), "top_k = -1"),
        (lambda: asked(max_new_tokens=0), "max_new_tokens = 0"),
        (lambda: asked(min_new_tokens=5), "min_new_tokens = 5"),
        (lambda: asked(stop_strings=("",)), "an empty string"),
        (lambda: asked(stop_strings=(b"a",)), "b'a': must be strings"),
    ]:
        with case(make, message), pytest.raises(ValueError, match=message):
            make()


def test_a_request_larger_than_the_cache_is_refused_however_empty_the_cache_is():
    with running(num_pages=6) as engine:
        with pytest.raises(RequestError, match=r"9 prompt tokens \+ 20 new tokens need 8 pages .* has 6.*kv_cache_gib"):
            engine.generate([request(tokens_of(9), max_new_tokens=20)])
        assert len(engine.generate([request(tokens_of(9), max_new_tokens=12)])[0].output_tokens) == 12


def test_a_request_of_the_models_whole_length_fits_however_few_sequences_there_are():
    """The cache is never larger than all sequences need, but it must hold at least one complete sequence."""
    for max_sequences in [1, 2]:
        with case(max_sequences), running(max_sequences=max_sequences) as engine:
            [response] = engine.generate([request(tokens_of(100), max_new_tokens=156)])
            assert len(response.output_tokens) == 156


def test_the_largest_request_the_cache_takes_is_served_beside_others():
    with running(num_pages=6) as engine:
        largest = request(tokens_of(9), max_new_tokens=12)
        requests = [largest, *(request(tokens_of(5), key, max_new_tokens=9) for key in range(4)), largest]
        assert [len(each.output_tokens) for each in engine.generate(requests)] == [12, 9, 9, 9, 9, 12]


def test_an_unknown_tag_is_refused_by_name(engine):
    for tags in [["kv"], ["weights", "gpu"], []]:
        with case(tags):
            for call in (engine.sleep, engine.wake):
                with pytest.raises(ConfigError) as caught:
                    call(tags)
                assert str(tags) in str(caught.value)
                assert "kv_cache, weights" in str(caught.value)
            assert not engine.metrics().is_asleep


def refused(**settings):
    with pytest.raises(ConfigError) as caught:
        Engine(make_model(), tokenizer(), EngineConfig(**settings))
    return str(caught.value)


def test_a_page_size_that_is_no_power_of_two_is_refused():
    for size in [3, 12, 17]:
        with case(size):
            assert f"engine.page_tokens = {size}: must be a power of two" in refused(page_tokens=size)


def test_a_cache_too_small_for_anything_is_refused():
    for gib in [1e-9, 7e-6]:
        with case(gib):
            assert f"engine.kv_cache_gib = {gib:g}" in refused(kv_cache_gib=gib)


def test_settings_out_of_range_are_refused_with_their_value():
    for override in [
        "engine.decode_steps=0",
        "engine.decode_steps=-3",
        "engine.page_tokens=-1",
        "engine.max_sequences=-1",
        "engine.max_queue=0",
        "engine.kv_cache_gib=-1",
        "engine.memory_fraction=1.5",
        "engine.update_mode=gently",
        "engine.max_prefil_tokens=5",
    ]:
        with case(override):
            with pytest.raises(ConfigError) as caught:
                load_config(None, [override])
            name, value = override.split("=")
            assert name in str(caught.value)
            assert value in str(caught.value) or "max_prefill_tokens" in str(caught.value)


def test_an_end_token_given_again_as_a_stop_token_is_one_stop(engine):
    [response] = engine.generate([asked(stop_token_ids=(END,), min_new_tokens=4)])
    assert len(response.output_tokens) == 4


def test_nothing_to_do_is_done_at_once(engine):
    assert engine.generate([]) == []
