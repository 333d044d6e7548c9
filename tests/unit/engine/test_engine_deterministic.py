"""Deterministic mode: a response's tokens and log-probs are the same bits whatever happens around it."""

from __future__ import annotations

import pytest
from cases import case
from engine.engine_parts import (
    LIMIT_S,
    Stepped,
    bits,
    late_token,
    make_model,
    request,
    running,
    stepped,
    tokens_of,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine.runners.fixed_rows import NUM_ROWS

LENGTHS = (1, 2, 7, 15, 16, 17, 33, 64, 70)
SAMPLING = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 7},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02},
    {"min_new_tokens": 5, "stop_token_ids": (9, 10, 11)},
)
REQUESTS = [
    request(tokens_of(length), number, max_new_tokens=10, **SAMPLING[number % len(SAMPLING)])
    for number, length in enumerate(LENGTHS)
]
NEIGHBOURS = [request(tokens_of(11, key), 100 + key, **SAMPLING[key % len(SAMPLING)]) for key in range(70)]


@pytest.fixture(scope="module")
def alone():
    responses = []
    with running(deterministic=True, prefix_cache=False) as engine:
        for each in REQUESTS:
            responses += engine.generate([each])
    return bits(responses)


def test_the_bits_of_the_fast_mode_do_depend_on_the_batch(alone):
    """Otherwise the tests below would prove nothing."""
    with running() as engine:
        assert bits(engine.generate(REQUESTS)) != alone


def test_a_batch_of_more_rows_than_a_block(alone):
    assert len(NEIGHBOURS) > NUM_ROWS
    with running(deterministic=True) as engine:
        assert bits(engine.generate([*NEIGHBOURS, *REQUESTS])[len(NEIGHBOURS) :]) == alone


def test_the_size_of_chunks(alone):
    for max_prefill_tokens in [5, 16, 1024]:
        with case(max_prefill_tokens), running(deterministic=True, max_prefill_tokens=max_prefill_tokens) as engine:
            assert bits(engine.generate(REQUESTS)) == alone


def test_a_prompt_found_in_the_cache_and_one_that_was_made_by_decoding(alone):
    """The cache of a response is built token by token. A later prompt that contains it reuses that cache."""
    with running(deterministic=True) as engine:
        engine.generate(NEIGHBOURS[:5])
        engine.generate([request(each.input_tokens[:-1] or (7,), 5, max_new_tokens=9) for each in REQUESTS])
        assert bits(engine.generate(REQUESTS)) == alone
        assert engine.metrics().num_tokens_cached > 0
        [free] = engine.generate([request(tokens_of(12), 3, max_new_tokens=50)])
        stop, count = late_token(free.output_tokens, 30)
        engine.generate([request(tokens_of(12), 3, max_new_tokens=50, stop_token_ids=(stop,))])
        conversation = (*tokens_of(12), *free.output_tokens[:count], *tokens_of(2))
        before = engine.metrics().num_tokens_cached
        warm = engine.generate([request(conversation, 4)])
        assert engine.metrics().num_tokens_cached - before > 12 + 16
    with running(deterministic=True) as engine:
        assert bits(engine.generate([request(conversation, 4)])) == bits(warm)


def test_making_room_for_others():
    requests = [request(tokens_of(length), key, max_new_tokens=24) for key, length in enumerate((3, 9, 17, 9))]
    with running(deterministic=True, page_tokens=4, prefix_cache=False) as engine:
        expected = [engine.generate([each])[0] for each in requests]
    with running(deterministic=True, num_pages=13) as engine:
        assert bits(engine.generate(requests)) == bits(expected)
        assert engine.metrics().num_preempted > 0


def test_an_interruption_by_the_same_weights(alone):
    for num_turns in [1, 3]:
        with case(num_turns), stepped(deterministic=True, decode_steps=2) as slow:
            answers = [slow.submit(each) for each in REQUESTS]
            slow.turn(num_turns)
            slow.engine.update_weights(weights(0, 1), "interrupt")
            slow.finish()
            assert slow.engine.metrics().num_interrupted == len(REQUESTS)
            assert bits([each.result(LIMIT_S) for each in answers]) == alone


def test_every_architecture():
    for kind in ("llama", "qwen2_window", "qwen3", "mistral", "gemma", "gemma3_text"):
        with case(kind):
            requests = [request(tokens_of(length), length, max_new_tokens=5) for length in (3, 17, 40)]
            with running(make_model(kind), deterministic=True, prefix_cache=False) as engine:
                expected = [engine.generate([each])[0] for each in requests]
            with running(make_model(kind), deterministic=True, max_prefill_tokens=5) as engine:
                assert bits(engine.generate([*NEIGHBOURS[:4], *requests])[4:]) == bits(expected)


@pytest.fixture(scope="module")
def engines():
    """One engine per configuration, reused: earlier requests must not matter either."""
    contexts = [
        stepped(deterministic=True, page_tokens=16, max_prefill_tokens=chunk, max_sequences=rows, gpu_like=gpu_like)
        for chunk, rows, gpu_like in ((5, 4, False), (16, 80, True), (1024, 7, True))
    ]
    yield [context.__enter__() for context in contexts]
    for context in contexts:
        context.__exit__(None, None, None)


@settings(max_examples=3, deadline=None)
@given(
    st.sampled_from([0, 1, 2]),
    st.permutations(range(len(REQUESTS))),
    st.lists(st.integers(0, 3), min_size=len(REQUESTS), max_size=len(REQUESTS)),
    st.lists(st.integers(0, 69), max_size=12),
    st.integers(0, 20),
)
def test_any_batch_in_any_order_of_arrival(engines, alone, which, order, pauses, neighbours, update_at):
    slow: Stepped = engines[which]
    answers = {}
    for number, (place, num_turns) in enumerate(zip(order, pauses, strict=True)):
        for neighbour in neighbours[number::4]:
            slow.submit(NEIGHBOURS[neighbour])
        answers[place] = slow.submit(REQUESTS[place])
        slow.turn(num_turns)
        if number == update_at:
            slow.engine.update_weights(weights(0, slow.engine.get_version() + 1), "interrupt")
    slow.finish()
    assert [bits([answers[place].result(LIMIT_S)])[0] for place in range(len(REQUESTS))] == alone
