"""Every body is either read or refused with a 4xx error. Nothing else may happen."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from serving.parts import NAME, limits

from headwater.serving.control import Abort, WeightsCall, read_memory_tags, read_nothing, read_version
from headwater.serving.errors import ApiError
from headwater.serving.fields import read_object, write_json
from headwater.serving.openai.chat import read_chat
from headwater.serving.openai.completions import read_completion
from headwater.serving.sglang.generate import read_generate
from headwater.serving.sglang.steering import AbortCall, PauseCall, UpdateFromDisk

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.sampled_from([2**70, -(2**70), 10**400]),
    st.floats(),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.text(st.characters(codec=None), max_size=4),
    st.sampled_from(["abc", "user", "text", "in_place", "drain", "weights", "a\ud800"]),
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "type", "text"]), SCALARS, max_size=3), max_size=3
)
VALUES = st.recursive(
    st.one_of(SCALARS, MESSAGES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["file", "n", "temperature", "top_k", "stop", "include_usage", "max_new_tokens", "x"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
READERS = {
    "completion": (
        lambda body: read_completion(body, limits(), NAME),
        ["prompt", "max_tokens", "n", "stop", "stream", "stream_options", "logprobs", "seed", "top_p", "min_p",
         "temperature", "stop_token_ids", "min_tokens", "logit_bias", "best_of", "suffix"],
    ),
    "chat": (
        lambda body: read_chat(body, limits(), NAME),
        ["messages", "max_completion_tokens", "top_logprobs", "tools", "response_format", "chat_template_kwargs",
         "continue_final_message", "add_generation_prompt", "modalities", "stop"],
    ),
    "generate": (
        lambda body: read_generate(body, limits()),
        ["text", "input_ids", "sampling_params", "rid", "return_logprob", "stream", "image_data", "lora_path"],
    ),
    "abort_request": (AbortCall.read, ["rid", "abort_all"]),
    "pause_generation": (PauseCall.read, ["mode"]),
    "update_from_disk": (UpdateFromDisk.read, ["model_path", "weight_version", "flush_cache", "load_format"]),
    "abort": (Abort.read, ["request_id", "all"]),
    "update_weights": (WeightsCall.read, ["version", "mode", "source"]),
    "version": (read_version, ["version"]),
    "sleep": (read_memory_tags, ["tags"]),
    "pause": (read_nothing, []),
}  # fmt: skip

PROMPTS = {
    "completion": {"prompt": "abc"},
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
    "generate": {"text": "abc"},
}
"""The required part of a body; without it the other fields are not read."""


def refused(read, body) -> ApiError | None:
    try:
        read(body)
    except ApiError as error:
        return error
    return None


def check_refusal(error: ApiError | None) -> None:
    if error is not None:
        assert 400 <= error.status < 500
        assert json.loads(write_json(error.body()))["error"]["message"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(READERS)), st.data())
def test_any_object_is_read_or_refused(call, data):
    read, fields = READERS[call]
    body = data.draw(st.dictionaries(st.sampled_from([*fields, "x"]), VALUES, max_size=4))
    if data.draw(st.booleans()):
        body = {**PROMPTS.get(call, {}), **body}
    check_refusal(refused(read, json.loads(json.dumps(body))))


def test_what_is_not_finite_is_read_or_refused_in_any_field():
    for call, (read, fields) in READERS.items():
        for value in (math.inf, -math.inf, math.nan):
            for field in fields:
                for body in ({field: value}, {field: [value]}, {field: {"temperature": value}}):
                    check_refusal(refused(read, {**PROMPTS.get(call, {}), **body}))


def test_a_number_too_large_for_a_float_is_refused_by_name():
    for call, body, field in [
        ("completion", b'{"prompt": "a", "temperature": 1e999}', "temperature = Infinity"),
        ("completion", b'{"prompt": "a", "min_p": -1e999}', "min_p = -Infinity"),
        ("chat", b'{"messages": [{"role": "user", "content": "a"}], "top_p": 1e400}', "top_p = Infinity"),
        ("generate", b'{"text": "a", "sampling_params": {"temperature": 1e400}}', "sampling_params.temperature"),
    ]:
        error = refused(READERS[call][0], read_object(body))
        assert error is not None, body
        assert error.status == 400, body
        assert field in str(error), body


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=50))
def test_any_bytes_are_an_object_or_refused(body):
    error = refused(read_object, body)
    assert error is None or error.status == 400
