"""However a prompt gets into the cache, the response is the same."""

from __future__ import annotations

import pytest
from cases import case
from engine.engine_parts import (
    LIMIT_S,
    assert_nothing_is_held,
    assert_same,
    late_token,
    make_model,
    request,
    running,
    stepped,
    texts,
    tokens_of,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine.loop import MAX_PREFILLS_PER_ROUND

LENGTHS = (1, 3, 8, 15, 16, 17, 33, 50)
SAMPLED = [request(tokens_of(length), key, max_new_tokens=16) for key, length in enumerate(LENGTHS)]
GREEDY = [request(tokens_of(length), temperature=0.0, max_new_tokens=16) for length in LENGTHS]
ALL = [*SAMPLED, *GREEDY]


@pytest.fixture(scope="module")
def alone():
    """Every request in a separate engine, without other requests or a prefix cache."""
    responses = []
    for each in ALL:
        with running(prefix_cache=False) as engine:
            responses += engine.generate([each])
    return responses


def test_in_a_batch_as_alone(alone):
    with running() as engine:
        assert_same(engine.generate(ALL), alone)


def test_with_fewer_rows_than_requests_as_alone(alone):
    with running(max_sequences=3) as engine:
        assert_same(engine.generate(ALL), alone)


def test_a_prompt_found_in_the_cache_as_a_cold_one(alone):
    with running() as engine:
        engine.generate(ALL)
        before = engine.metrics()
        assert_same(engine.generate(ALL), alone)
        after = engine.metrics()
    found = after.num_tokens_cached - before.num_tokens_cached
    computed = after.num_tokens_prefilled - before.num_tokens_prefilled
    full_pages = sum((length - 1) // 16 * 16 for length in LENGTHS)
    # SAMPLED and GREEDY have the same prompts, which are computed once.
    assert (found, computed) == (full_pages, sum(LENGTHS) - full_pages)


def test_the_next_turn_of_a_conversation_finds_the_last_one_and_its_response():
    with running() as engine:
        [free] = texts(engine.generate([request(tokens_of(20), 1, max_new_tokens=60)]))
    stop, count = late_token(free, 30)
    first = request(tokens_of(20), 1, max_new_tokens=60, stop_token_ids=(stop,))
    with running() as engine:
        [answer] = engine.generate([first])
        assert answer.stop_reason == "stop"
        conversation = (*first.input_tokens, *answer.output_tokens, *tokens_of(5))
        before = engine.metrics()
        following = engine.generate([request(conversation, 2)])
        assert engine.metrics().num_tokens_cached - before.num_tokens_cached == (20 + count - 1) // 16 * 16
    with running() as engine:
        assert_same(engine.generate([request(conversation, 2)]), following)


def test_without_a_prefix_cache_nothing_is_found():
    with running(prefix_cache=False) as engine:
        for _ in range(2):
            engine.generate([request(tokens_of(50))])
        assert engine.metrics().num_tokens_cached == 0
        assert engine.metrics().num_tokens_prefilled == 100


def test_a_group_computes_its_prompt_once_and_says_what_its_members_say_alone():
    for length in [16, 37]:
        with case(length):
            group = [request(tokens_of(length), key, max_new_tokens=10) for key in range(16)]
            with running() as engine:
                together = engine.generate(group)
                assert engine.metrics().num_tokens_prefilled == length
            separate = []
            with running(prefix_cache=False) as engine:
                for each in group:
                    separate += engine.generate([each])
                ungrouped = engine.metrics().num_tokens_prefilled
            assert length * 12 <= ungrouped == 16 * length
            assert_same(together, separate)
            assert len(set(texts(together))) == 16


def test_a_group_larger_than_the_rows_is_served_in_turns():
    group = [request(tokens_of(21), key) for key in range(11)]
    with running() as engine:
        expected = engine.generate(group)
    with running(max_sequences=4) as engine:
        assert_same(engine.generate(group), expected)
        assert_nothing_is_held(engine)


def test_a_group_larger_than_the_cache_is_served_in_turns():
    """There are too few pages for all members at once. The others start from the same tokens later."""
    group = [request(tokens_of(7), key, max_new_tokens=10) for key in range(12)]
    with running(page_tokens=4) as engine:
        expected = engine.generate(group)
    with running(num_pages=9, max_prefill_tokens=3) as engine:
        assert_same(engine.generate(group), expected)
        assert_nothing_is_held(engine)


def test_making_room_for_others_changes_nothing():
    """Preempted sequences keep their tokens: no more tokens are generated than returned."""
    requests = [request(tokens_of(length), key, max_new_tokens=30) for key, length in enumerate((3, 9, 17, 9, 4, 12))]
    with running(page_tokens=4) as engine:
        expected = engine.generate(requests)
        assert engine.metrics().num_preempted == 0
    for num_pages in (13, 30):
        with case(num_pages), running(num_pages=num_pages) as engine:
            responses = engine.generate(requests)
            assert_same(responses, expected)
            metrics = engine.metrics()
            assert metrics.num_preempted > 0
            assert metrics.num_tokens_generated == sum(map(len, texts(responses)))
            assert_nothing_is_held(engine)


def test_a_sequence_that_made_room_after_an_update_in_flight_keeps_the_versions_of_its_tokens():
    with stepped(num_pages=9, decode_steps=2) as slow:
        old = slow.submit(request(tokens_of(9), 1, max_new_tokens=20))
        young = slow.submit(request(tokens_of(9), 2, max_new_tokens=20))
        slow.turn(3)
        slow.engine.update_weights(weights(1, 5), "in_flight")
        slow.finish()
        assert slow.engine.metrics().num_preempted > 0
        for answer in (old, young):
            versions = answer.result(LIMIT_S).output_versions
            assert versions.count(0) >= 5
            assert versions == tuple(sorted(versions))


def test_in_chunks_as_at_once(alone):
    for max_prefill_tokens in [3, 7, 16]:
        with case(max_prefill_tokens), running(max_prefill_tokens=max_prefill_tokens) as engine:
            assert_same(engine.generate(ALL), alone)


def test_a_sliding_window_sees_the_same_tokens_on_every_path():
    requests = [request(tokens_of(length), key, max_new_tokens=16) for key, length in enumerate((3, 17, 17, 40))]
    for kind in ("mistral", "gemma3_text"):
        with running(make_model(kind), page_tokens=4) as engine:
            expected = engine.generate(requests)
        for path in ({"max_prefill_tokens": 7}, {"num_pages": 30}, {"deterministic": True}):
            with case(kind, path), running(make_model(kind), **{"page_tokens": 4, **path}) as engine:
                assert_same(engine.generate(requests), expected)


def test_interrupted_by_an_update_to_the_same_weights_as_uninterrupted(alone):
    for num_turns in [1, 2, 3]:
        with case(num_turns), stepped(decode_steps=4) as slow:
            answers = [slow.submit(each) for each in ALL]
            slow.turn(num_turns)
            slow.engine.update_weights(weights(0, 1), "interrupt")
            slow.finish()
            assert slow.engine.metrics().num_interrupted > 0
            assert_same([answer.result(LIMIT_S) for answer in answers], alone)


def test_a_request_for_a_prompt_that_is_being_computed_shares_the_computation():
    prompt = tokens_of(50)
    with running() as engine:
        expected = engine.generate([request(prompt, key) for key in range(2)])
    with stepped(max_prefill_tokens=2) as slow:
        first = slow.submit(request(prompt, 0))
        slow.turn()
        assert 0 < slow.engine.metrics().num_tokens_prefilled < 50
        late = slow.submit(request(prompt, 1))
        slow.finish()
        assert slow.engine.metrics().num_tokens_prefilled == 50
        assert_same([first.result(LIMIT_S), late.result(LIMIT_S)], expected)


def test_a_request_for_a_prompt_half_computed_under_older_weights_starts_afresh():
    """Two jobs with the same tokens exist at a time. They must not be confused."""
    prompt = tokens_of(50)
    with running(make_model(seed=1)) as engine:
        expected = engine.generate([request(prompt, 1)])
    with stepped(max_prefill_tokens=2) as slow:
        first = slow.submit(request(prompt, 0))
        slow.turn()
        slow.engine.update_weights(weights(1, 1), "in_flight")
        late = slow.submit(request(prompt, 1))
        slow.finish()
        assert set(first.result(LIMIT_S).output_versions) == {1}
        assert_same([late.result(LIMIT_S)], expected)
        assert_nothing_is_held(slow.engine)


def test_members_left_over_while_their_prompt_is_still_computed_are_served():
    """Rows become free while a long prompt of a large group is partly computed."""
    with stepped(max_sequences=3, max_prefill_tokens=1, page_tokens=4, decode_steps=2) as slow:
        others = [slow.submit(request(tokens_of(1), key, max_new_tokens=4)) for key in range(2)]
        slow.turn()
        group = [slow.submit(request(tokens_of(60), key, max_new_tokens=3)) for key in range(5)]
        slow.finish()
        assert [len(each.result(LIMIT_S).output_tokens) for each in (*others, *group)] == [4] * 2 + [3] * 5
        assert_nothing_is_held(slow.engine)


@pytest.fixture(scope="module")
def roomy():
    with running(page_tokens=4) as engine:
        yield engine


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24)), min_size=1, max_size=10),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([12, 20, 64]),
    st.sampled_from([1, 3, 16]),
    st.booleans(),
)
def test_any_mixture_of_prompts_with_common_starts_gives_the_same_text(
    roomy, asked, chunk, num_pages, rows, prefix_cache
):
    trunk = tokens_of(24)
    # Greedy, because in some sampled case rounding would decide between two tokens.
    requests = [
        request((*trunk[:shared], *tokens_of(3, tail)), number, max_new_tokens=9, temperature=0.0)
        for number, (tail, shared) in enumerate(asked)
    ]
    expected = [roomy.generate([each])[0] for each in requests]
    settings = {"max_prefill_tokens": chunk, "max_sequences": rows, "prefix_cache": prefix_cache}
    with running(num_pages=num_pages, **settings) as engine:
        assert_same(engine.generate(requests), expected)
        assert_nothing_is_held(engine)


def test_older_requests_are_not_overtaken_by_younger_short_ones():
    with stepped(max_prefill_tokens=4, max_sequences=2, decode_steps=2) as slow:
        long = slow.submit(request(tokens_of(200), 0, max_new_tokens=2))
        short = [slow.submit(request(tokens_of(3), key, max_new_tokens=40)) for key in range(1, 5)]
        slow.turn(200 // 4 // MAX_PREFILLS_PER_ROUND + 3)
        slow.settle()
        assert long.done()
        assert not any(each.done() for each in short)
        slow.finish()
