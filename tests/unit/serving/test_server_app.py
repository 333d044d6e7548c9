"""Calls to a server in this process, over the embedded engine with random weights."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import ClientWebSocketResponse, WSCloseCode, WSMsgType
from aiohttp.test_utils import TestClient, TestServer
from engine.engine_parts import LIMIT_S, run, running, tokens_of
from tiny import tokenizer

from headwater.core.new_tokens import TOKEN, NewTokens
from headwater.engine.engine import Engine
from headwater.serving.app import build_app
from headwater.serving.native import routes
from headwater.serving.native.request import read_request
from headwater.serving.options import ServerOptions
from headwater.serving.state import STATE

NAME = "org/model:7b"
PAGE_TOKENS, NUM_PAGES = 4, 12
NUM_MOST = 45  # 11 pages and 1 token: one page is reserved for a copy, and the last token is not fed back


@pytest.fixture(scope="module")
def small() -> Iterator[Engine]:
    """Its model supports 256 tokens, its KV cache far fewer."""
    with running(num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS, prefix_cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def roomy() -> Iterator[Engine]:
    with running() as engine:
        yield engine


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(build_app(engine, tokenizer(), ServerOptions(NAME)))) as client:
        yield client


async def post(client: TestClient[Any, Any], path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with client.post(path, json=body) as reply:
        return reply.status, await reply.json()


# The length of a response


def ask(engine: Engine, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async def scenario() -> tuple[int, Any]:
        async with serving(engine) as client:
            return await post(client, path, body)

    return run(scenario())


def test_a_response_without_a_given_length_fits_the_cache(small):
    assert small.limits.max_request_tokens == NUM_MOST < small.limits.max_model_tokens
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "temperature": 0}
    status, body = ask(small, "/v1/chat/completions", chat)
    assert (status, body["usage"]["total_tokens"]) == (200, NUM_MOST)


def test_responses_answer_as_chats_do(small):
    settings = {"temperature": 0, "seed": 1}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, **settings}
    _, wanted = ask(small, "/v1/chat/completions", chat)
    status, made = ask(small, "/v1/responses", {"input": "hi", "max_output_tokens": 6, **settings})
    assert (status, made["object"]) == (200, "response")
    assert made["output"][0]["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert made["usage"]["total_tokens"] == wanted["usage"]["total_tokens"]
    status, refused = ask(small, "/v1/responses", {"input": "hi", "previous_response_id": "resp_1"})
    assert (status, refused["error"]["param"]) == (400, "previous_response_id")
    for name, value in [("background", True), ("include", ["message.output_text.logprobs"])]:
        status, refused = ask(small, "/v1/responses", {"input": "hi", name: value})
        assert (status, refused["error"]["param"]) == (400, name)


def test_a_default_length_is_also_limited_by_the_cache(small):
    for path, body in [
        ("/v1/completions", {"ignore_eos": True, "prompt": tokens_of(40)}),
        ("/generate", {"sampling_params": {"ignore_eos": True}, "input_ids": tokens_of(40)}),
    ]:
        status, answer = ask(small, path, body)
        usage = answer["usage"] if "usage" in answer else answer["meta_info"]
        assert (status, usage["completion_tokens"]) == (200, NUM_MOST - 40), path


def test_a_request_that_exceeds_the_cache_is_refused(small):
    prompt = tokens_of(40)
    status, body = ask(small, "/v1/completions", {"prompt": prompt, "max_tokens": NUM_MOST - 40, "ignore_eos": True})
    assert (status, body["usage"]["total_tokens"]) == (200, NUM_MOST)
    status, body = ask(small, "/v1/completions", {"prompt": prompt, "max_tokens": NUM_MOST - 39})
    assert status == 400
    assert "40 prompt tokens + 6 new tokens need 13 pages of the KV cache, which has 12" in body["error"]["message"]


TOO_LONG = [
    ("/v1/completions", {"prompt": tokens_of(300)}, "prompt"),
    ("/v1/completions", {"prompt": [[5], tokens_of(300)]}, "prompt[1]"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 300_000}, "max_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi" * 300}]}, "messages"),
    ("/generate", {"text": "hi" * 300}, "text"),
    ("/generate", {"input_ids": [[5], tokens_of(300)]}, "input_ids[1]"),
    (
        "/headwater/generate",
        {"input_tokens": tokens_of(300), "sampling": {"max_new_tokens": 4}, "rng_key": 1},
        "input_tokens",
    ),
    (
        "/headwater/generate",
        {"input_tokens": [5], "sampling": {"max_new_tokens": 300_000}, "rng_key": 1},
        "sampling.max_new_tokens",
    ),
]


def test_the_message_names_the_field_that_is_too_long(roomy):
    for path, body, param in TOO_LONG:
        status, answer = ask(roomy, path, body)
        assert (status, answer["error"]["param"]) == (400, param), path
        assert answer["error"]["message"].startswith(param), path
        assert answer["error"]["code"] == "context_length_exceeded", path


def test_the_limits_in_force_are_reported(small):
    async def scenario() -> tuple[Any, Any]:
        async with serving(small) as client, client.get("/get_server_info") as info, client.get("/v1/models") as models:
            return await info.json(), await models.json()

    info, models = run(scenario())
    assert (info["max_request_tokens"], models["data"][0]["max_model_len"]) == (NUM_MOST, NUM_MOST)
    assert info["page_tokens"] == PAGE_TOKENS
    assert (info["max_sequences"], info["max_prefill_tokens"]) == (small.config.max_sequences, 1024)
    assert 0 < info["kv_cache_gib"] < 0.01


MANY = [f"zz{number}q" for number in range(65)]


def with_stops(stops: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """A request with ``stops`` in every API: its path, the field's name, its body."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stop": stops}
    native = {"input_tokens": [5], "rng_key": 1, "sampling": {"max_new_tokens": 4, "stop_strings": stops}}
    return [
        ("/v1/completions", "stop", {"prompt": "hi", "n": 64, "stop": stops}),
        ("/v1/chat/completions", "stop", chat),
        ("/generate", "sampling_params.stop", {"text": "hi", "sampling_params": {"stop": stops}}),
        ("/headwater/generate", "sampling.stop_strings", native),
    ]


def test_stop_texts_beyond_the_limits_are_refused_by_name(roomy):
    for stops, message in [
        (MANY, ": contains 65 texts, and the limit is 64; use fewer"),
        (["a", "b" * 1_000_000], f"[1] = '{'b' * 40}'...: has 1000000 characters, and the limit is 1024"),
    ]:
        for path, param, asked in with_stops(stops):
            status, body = ask(roomy, path, asked)
            assert (status, body["error"]["param"]) == (400, param), path
            assert f"{param}{message}" in body["error"]["message"], path


def test_as_many_stop_texts_as_are_taken_are_served(roomy):
    body = {"prompt": "hi", "max_tokens": 9, "ignore_eos": True, "stop": [*MANY[:63], "€" * 1024]}
    status, answer = ask(roomy, "/v1/completions", body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 9)


def test_a_prompt_that_the_cache_cannot_hold_is_refused(small):
    status, body = ask(small, "/v1/completions", {"prompt": tokens_of(60)})
    assert status == 400
    assert "raise engine.kv_cache_gib" in body["error"]["message"]


# Requests over one connection


LONG = {"input_tokens": [5, 6], "sampling": {"max_new_tokens": 200, "ignore_end": True}, "rng_key": 1}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  the engine's counters cannot be awaited
            await asyncio.sleep(0.005)


async def ends_of(socket: ClientWebSocketResponse, count: int) -> dict[int, str]:
    """How ``count`` requests ended, by their numbers."""
    ends: dict[int, str] = {}
    while len(ends) < count:
        ends |= dict(NewTokens.decode(await socket.receive_bytes(timeout=LIMIT_S)).ended)
    return ends


@pytest.fixture
def paused(roomy: Engine) -> Iterator[Engine]:
    """A paused engine: requests wait until they are aborted, even if the test is slow."""
    roomy.pause()
    yield roomy
    roomy.resume()
    assert roomy.metrics().num_waiting + roomy.metrics().num_running == 0


def num_waiting(engine: Engine) -> int:
    return engine.metrics().num_waiting


def test_a_request_of_a_connection_is_aborted_by_its_id(paused):
    async def scenario() -> None:
        async with serving(paused) as client, client.ws_connect("/headwater/connect") as socket:
            for number, name in enumerate(["mine", "yours", "mine"]):  # two with the same name: both are accepted
                await socket.send_json({"id": number, "request": {**LONG, "request_id": name}})
            await until(lambda: num_waiting(paused) == 3)
            assert await post(client, "/control/abort", {"request_id": "mine"}) == (200, {"num_aborted": 2})
            assert await ends_of(socket, 2) == {0: "abort", 2: "abort"}
            # Both have ended, so the name is free.
            assert await post(client, "/control/abort", {"request_id": "mine"}) == (200, {"num_aborted": 0})
            assert await post(client, "/control/abort", {"request_id": "yours"}) == (200, {"num_aborted": 1})
            assert await ends_of(socket, 1) == {1: "abort"}

    run(scenario())


def test_a_connection_that_drops_keeps_no_name_and_takes_none_from_others(paused):
    async def scenario() -> None:
        async with serving(paused) as client, client.ws_connect("/headwater/connect") as stays:
            request = {"id": 1, "request": {**LONG, "request_id": "mine"}}
            async with client.ws_connect("/headwater/connect") as drops:
                await drops.send_json(request)
                await stays.send_json(request)
                await until(lambda: num_waiting(paused) == 2)
            await until(lambda: num_waiting(paused) == 1)
            assert await post(client, "/control/abort", {"request_id": "mine"}) == (200, {"num_aborted": 1})
            assert await ends_of(stays, 1) == {1: "abort"}
            # A request that its client ends frees its name too.
            await stays.send_json(request)
            await until(lambda: num_waiting(paused) == 1)
            await stays.send_json({"id": 1, "leave": True})
            await until(lambda: num_waiting(paused) == 0)
            assert client.app[STATE].active.find("mine") == ()

    run(scenario())


def test_long_messages_of_a_connection_are_read_in_a_thread(paused, monkeypatch):
    threads = []

    def padded(value):
        return json.dumps(value) + " " * 200_000

    def read(*arguments):
        threads.append(threading.current_thread().name)
        return read_request(*arguments)

    monkeypatch.setattr(routes, "read_request", read)

    async def scenario() -> None:
        async with serving(paused) as client, client.ws_connect("/headwater/connect") as socket:
            await socket.send_json({"id": 1, "request": LONG})
            await socket.send_json({"id": 2, "request": LONG}, dumps=padded)
            # The messages after a long one wait for it.
            await socket.send_json({"id": 2, "leave": True})
            await socket.send_json({"id": 1, "leave": True})
            await socket.send_json({"id": 3, "request": {}}, dumps=padded)
            [line] = await socket.receive_json(timeout=LIMIT_S)
            assert (line["id"], "input_tokens" in line["error"]["message"]) == (3, True)
            await until(lambda: num_waiting(paused) == 0)

    run(scenario())
    assert threads[0] == threading.current_thread().name
    assert all(name.startswith("headwater-body") for name in threads[1:])
    assert len(threads) == 3


def test_a_connection_gets_rounds_and_not_one_message_per_request(roomy):
    async def scenario() -> None:
        async with serving(roomy) as client, client.ws_connect("/headwater/connect") as socket:
            count = 24
            await asyncio.to_thread(roomy.pause)  # so that all begin together
            for number in range(count):
                await socket.send_json({"id": number, "request": {**LONG, "rng_key": number}})
            await until(lambda: num_waiting(roomy) == count)
            await asyncio.to_thread(roomy.resume)
            ended, output, num_frames = set(), [bytearray() for _ in range(count)], 0
            while len(ended) < count:
                new = NewTokens.decode(await socket.receive_bytes(timeout=LIMIT_S))
                ended |= {number for number, _ in new.ended}
                num_frames += 1
                for number, tokens in new.rows():
                    output[number] += tokens
            assert {len(each) for each in output} == {200 * TOKEN.itemsize}
            num_rounds = 200 / roomy.config.decode_steps
            assert num_frames < 4 * num_rounds + count, "a frame holds the tokens of all requests"
            # A request that cannot be served is refused alone, and one that is still being ended keeps its number.
            await socket.send_json({"id": 1, "request": {**LONG, "input_tokens": [999_999]}})
            [line] = await socket.receive_json(timeout=LIMIT_S)
            assert (line["id"], "no such token" in line["error"]["message"]) == (1, True)
            await asyncio.to_thread(roomy.pause)  # the first one does not end before the second one comes
            await socket.send_json({"id": 2, "request": LONG})
            await socket.send_json({"id": 2, "request": LONG})
            async for message in socket:
                assert message.type is WSMsgType.BINARY
            assert socket.close_code == WSCloseCode.POLICY_VIOLATION

    try:
        run(scenario())
    finally:
        roomy.resume()
    run(until(lambda: not num_waiting(roomy) + roomy.metrics().num_running))


# The model's name


def test_the_model_by_its_name(small):
    async def scenario() -> None:
        async with serving(small) as client:
            url = str(client.make_url("/v1"))
            async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as asks:
                listed = [model async for model in asks.models.list()]
                assert await asks.models.retrieve(NAME) == listed[0]
                with pytest.raises(openai.NotFoundError, match=f"this server serves '{NAME}'") as caught:
                    await asks.models.retrieve("org/other")
                assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            # Not every client escapes a slash.
            async with client.get(f"/v1/models/{NAME}") as reply:
                assert (reply.status, (await reply.json())["id"]) == (200, NAME)

    run(scenario())


def test_a_folder_also_has_the_name_of_its_last_part(small):
    async def scenario() -> None:
        options = ServerOptions("/models/some-model", short_name="some-model")
        async with TestClient(TestServer(build_app(small, tokenizer(), options))) as client:
            for name in options.names:
                for path, body in (
                    ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
                ):
                    async with client.post(path, json={"model": name, **body}) as reply:
                        assert (await reply.json())["model"] == "/models/some-model"
                async with client.post("/tokenize", json={"model": name, "prompt": "hi"}) as reply:
                    assert reply.status == 200
                async with client.get(f"/v1/models/{name}") as reply:
                    assert (await reply.json())["id"] == "/models/some-model"
            async with client.get("/v1/models") as reply:
                assert [each["id"] for each in (await reply.json())["data"]] == ["/models/some-model"]
            for name in ("", "model", "models/some-model"):
                async with client.post("/v1/completions", json={"model": name, "prompt": "hi"}) as reply:
                    message = (await reply.json())["error"]["message"]
                    assert reply.status == 404
                    assert "this server serves '/models/some-model' or 'some-model'" in message

    run(scenario())
