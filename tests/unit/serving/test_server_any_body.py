"""Every body is either read or refused with a 4xx error. Nothing else may happen."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from aiohttp import web
from engine.engine_parts import running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving.parts import NAME, OPTIONS, limits
from tiny import tokenizer

from headwater.chat.parsers import make_parser
from headwater.serving.app import build_app
from headwater.serving.control import Abort, WeightsCall, read_memory_tags, read_nothing, read_version
from headwater.serving.errors import ApiError
from headwater.serving.fields import read_object, write_json
from headwater.serving.listen import bind, make_runner, url
from headwater.serving.openai.chat import read_chat
from headwater.serving.openai.completions import read_completion
from headwater.serving.openai.responses import chat_body
from headwater.serving.options import ServerOptions
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
    st.sampled_from(["abc", "user", "text", "in_place", "drain", "weights", "a\ud800", "function", "required"]),
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "type", "text"]), SCALARS, max_size=3), max_size=3
)
VALUES = st.recursive(
    st.one_of(SCALARS, MESSAGES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["file", "function", "name", "arguments", "n", "temperature", "top_k", "stop", "x"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
READERS = {
    "completion": (
        lambda body: read_completion(body, limits(), OPTIONS),
        ["prompt", "max_tokens", "n", "stop", "stream", "stream_options", "logprobs", "seed", "top_p", "min_p",
         "temperature", "stop_token_ids", "min_tokens", "logit_bias", "best_of", "suffix"],
    ),
    "chat": (
        lambda body: read_chat(body, limits(), OPTIONS, make_parser("auto", tokenizer())),
        ["messages", "tool_choice", "parallel_tool_calls",
         "max_completion_tokens", "top_logprobs", "tools", "response_format", "chat_template_kwargs",
         "continue_final_message", "add_generation_prompt", "modalities", "stop"],
    ),
    "responses": (
        lambda body: read_chat(chat_body(body), limits(), OPTIONS, make_parser("auto", tokenizer())),
        ["input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "metadata", "stream", "top_p"],
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
    "responses": {"input": "hello"},
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


@settings(max_examples=100, deadline=None)
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


# Over HTTP


CALLS = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/generate": "generate",
    "/abort_request": "abort_request",
    "/update_weights_from_disk": "update_from_disk",
    "/control/abort": "abort",
    "/control/update_weights": "update_weights",
    "/control/sleep": "sleep",
}
ANY_JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
HTTP_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of this process, whose engine has few pages."""
    loop = asyncio.new_event_loop()
    with running(num_pages=24, page_tokens=4) as engine, bind("127.0.0.1", 0) as taken:
        options = ServerOptions(NAME, max_responses=4)
        runner = make_runner(build_app(engine, tokenizer(), options), options)

        async def start() -> None:
            await runner.setup()
            await web.SockSite(runner, taken).start()

        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(start(), loop).result(HTTP_LIMIT_S)
        yield url(taken)
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(HTTP_LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HTTP_LIMIT_S)
        loop.close()


def answer(address: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, body), timeout=HTTP_LIMIT_S) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.sampled_from(sorted(CALLS)), st.data())
def test_any_body_gets_an_answer_or_a_json_error(server, path, data):
    _, fields = READERS[CALLS[path]]
    body = data.draw(st.dictionaries(st.sampled_from([*fields, "x"]), VALUES | ANY_JSON, max_size=3))
    if data.draw(st.booleans()):
        body = {**PROMPTS.get(CALLS[path], {}), **body}
    sent = data.draw(st.sampled_from([json.dumps(body).encode(), json.dumps(body).encode()[:-1]]) | st.binary())
    status, received = answer(server, path, sent)
    assert status == 200 or 400 <= status < 500 or status == 501, (path, sent, received)
    if status != 200:
        refused = json.loads(received)
        message = refused["message"] if "success" in refused else refused["error"]["message"]
        assert 0 < len(message) < 2000
    if path == "/control/sleep" and status == 200:
        assert answer(server, "/control/wake", b"{}")[0] == 200
    assert answer(server, "/health", None) == (200, b'{"status":"ok"}')


def test_a_body_that_is_nested_too_deeply_is_refused(server):
    deep = b"[" * 900 + b"]" * 900
    nan = b"[" * 900 + b"NaN" + b"]" * 900
    for path, body in [
        ("/v1/completions", b'{"prompt": %b}'),
        ("/v1/completions", b'{"prompt": "a", "logit_bias": %b}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a", "x": %b}]}'),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"t": %b}}',
        ),
        ("/generate", b'{"text": %b}'),
        ("/control/update_weights", b'{"version": %b}'),
    ]:
        for nested in (deep, nan, b"[" * 100_000):
            status, received = answer(server, path, body % nested)
            assert status == 200 or (400 <= status < 500 and b"error" in received), (path, received[:200])
