"""Requests of Headwater's own API."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from serving.parts import assert_refused, limits

from headwater.core.requests import ModelRequest, SamplingParams
from headwater.serving.native.request import read_request, write_request

TOKENS = st.lists(st.integers(0, 511), max_size=6).map(tuple)
WHOLE = {"input_tokens": [5, 6], "sampling": {"max_new_tokens": 4}, "rng_key": 1}


@st.composite
def requests(draw) -> ModelRequest:
    budget = draw(st.integers(1, 50))
    sampling = SamplingParams(
        max_new_tokens=budget,
        temperature=draw(st.floats(0, 5)),
        top_k=draw(st.integers(0, 2**40)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1, exclude_max=True)),
        min_new_tokens=draw(st.integers(0, budget)),
        stop_token_ids=draw(TOKENS),
        stop_strings=tuple(draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3))),
        ignore_end=draw(st.booleans()),
    )
    key = draw(st.integers(-(2**63), 2**63 - 1))
    return ModelRequest("r", (3, *draw(TOKENS)), sampling, key, given_tokens=draw(TOKENS))


@settings(max_examples=50, deadline=None)
@given(requests())
def test_a_request_arrives_as_it_was_sent(request):
    assert read_request(json.loads(json.dumps(write_request(request))), limits()) == request


REFUSED = [
    ({"input_tokens": []}, "input_tokens: is empty"),
    ({"input_tokens": "hello"}, 'input_tokens = "hello": must be a list of token ids'),
    ({"given_tokens": [5, 512]}, "given_tokens[1] = 512: no such token"),
    ({"given_tokens": [5, 1.5]}, "given_tokens[1] = 1.5: must be a whole number"),
    ({"sampling": None}, "sampling: is missing"),
    ({"sampling": {"temperature": 1}}, "sampling.max_new_tokens: is missing"),
    ({"sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens = 0: must be >= 1"),
    ({"sampling": {"max_new_tokens": 4, "top_p": 0}}, "sampling.top_p = 0.0: must be in"),
    ({"sampling": {"max_new_tokens": 4, "stop": "x"}}, "sampling.stop: no such field; did you mean"),
    ({"rng_key": None}, "rng_key: is missing"),
    ({"rng_key": 2**63}, "rng_key = 9223372036854775808: must be <="),
    ({"prompt": "x"}, "prompt: no such field"),
]


def test_refusals_name_field_value_and_remedy():
    assert_refused(lambda change: read_request({**WHOLE, **change}, limits()), REFUSED)


def test_defaults_are_those_of_the_record():
    request = read_request(WHOLE, limits())
    assert request.sampling == SamplingParams(max_new_tokens=4)
    assert request.given_tokens == ()
