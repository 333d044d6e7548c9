"""Requests with given tokens: they continue as if they had never been interrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.engine_parts import VOCABULARY, collect, make_model, request, run, running, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokenizer

from headwater.core.errors import RequestError
from headwater.core.requests import ModelRequest, ModelResponse

SAMPLING = (
    {},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 40},
    {"min_new_tokens": 9, "stop_token_ids": tuple(range(6, 120))},
    {"ignore_end": False},
)
REQUESTS = [
    request(tokens_of(length), number, max_new_tokens=20, **SAMPLING[number % len(SAMPLING)])
    for number, length in enumerate((1, 5, 16, 17, 64, 3, 8, 15, 30, 40))
]


@pytest.fixture(scope="module")
def engine():
    with running(deterministic=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(engine):
    return engine.generate(REQUESTS)


def going_on(asked: ModelRequest, response: ModelResponse, count: int) -> ModelRequest:
    return replace(asked, given_tokens=response.output_tokens[:count])


def rest(response: ModelResponse, count: int) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    return response.output_tokens[count:], response.output_logprobs[count:], response.stop_reason


def test_every_split_of_every_response_is_the_response(engine, whole):
    asked, wanted = [], []
    for each, response in zip(REQUESTS, whole, strict=True):
        for count in range(len(response.output_tokens) + 1):
            asked.append(going_on(each, response, count))
            wanted.append(rest(response, count))
    assert len(asked) > 100
    assert [rest(each, 0) for each in engine.generate(asked)] == wanted
    assert {reason for _, _, reason in wanted} == {"stop", "length"}


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_a_response_in_many_pieces(engine, whole, data):
    place = data.draw(st.integers(0, len(REQUESTS) - 1))
    asked, wanted = REQUESTS[place], whole[place]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(wanted.output_tokens)), max_size=4)))
    pieces = [engine.generate([going_on(asked, wanted, cut)])[0] for cut in cuts]
    assert [rest(piece, 0) for piece in pieces] == [rest(wanted, cut) for cut in cuts]


def stop_across(response: ModelResponse) -> tuple[str, int]:
    """A text that spans several tokens in the middle of a response, and the number of tokens up to its end."""
    for end in range(8, len(response.output_tokens)):
        text = tokenizer().decode(list(response.output_tokens[end - 3 : end]))
        before = tokenizer().decode(list(response.output_tokens[: end - 1]))
        if "\ufffd" not in text and len(text) >= 3 and text not in before:
            return text, end
    raise AssertionError("no text of whole characters lies across three tokens")


def test_a_stop_string_across_the_split(engine):
    """Two of its tokens are given and one is sampled, or the other way round."""
    prompt = tokens_of(6)
    for key in range(50):
        [free] = engine.generate([request(prompt, key, max_new_tokens=60)])
        try:
            stop, end = stop_across(free)
        except AssertionError:
            continue
        break
    asked = request(prompt, key, max_new_tokens=60, stop_strings=(stop,))
    [response] = engine.generate([asked])
    assert (response.stop_reason, len(response.output_tokens)) == ("stop", end)
    counts = range(end + 1)
    split = engine.generate([going_on(asked, response, count) for count in counts])
    assert [rest(each, 0) for each in split] == [rest(response, count) for count in counts]


def test_a_whole_response_is_answered_at_once(engine):
    asked = request((5, 6, 7), 1, max_new_tokens=4)
    for given_tokens in [(9, 9, 9, 9), (9,) * 7]:
        [response] = engine.generate([replace(asked, given_tokens=given_tokens)])
        assert (response.output_tokens, response.stop_reason) == ((), "length")
    stops = replace(asked, sampling=replace(asked.sampling, stop_token_ids=(9,)))
    engine.pause()
    [response] = engine.generate([replace(stops, given_tokens=(8, 9))])
    engine.resume()
    assert (response.output_tokens, response.stop_reason) == ((), "stop")
    later = replace(stops, given_tokens=(8, 9), sampling=replace(stops.sampling, min_new_tokens=3))
    [response] = engine.generate([later])
    assert 1 <= len(response.output_tokens) <= 2


def test_a_stream_has_only_what_is_new(engine, whole):
    deltas = run(collect(engine.astream(going_on(REQUESTS[0], whole[0], 5))))
    assert tuple(token for delta in deltas for token in delta.tokens) == whole[0].output_tokens[5:]
    assert tuple(version for delta in deltas for version in delta.versions) == (0,) * 15
    assert deltas[-1].stop_reason == "length"


def test_given_tokens_are_checked_and_count_in_the_limits():
    with running(make_model(), num_pages=10, page_tokens=4) as engine:
        with pytest.raises(RequestError, match=f"token id {VOCABULARY} is outside the vocabulary"):
            engine.generate([replace(request((5,)), given_tokens=(7, VOCABULARY))])
        # 9 of the 10 pages: given tokens are part of the budget and need no additional room.
        asked = request((5, 6), 3, max_new_tokens=34)
        [response] = engine.generate([asked])
        [later] = engine.generate([replace(asked, given_tokens=response.output_tokens[:33])])
        assert later.output_tokens == response.output_tokens[33:]
