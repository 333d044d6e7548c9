"""The router over real servers: they are killed, drained, added and updated while requests run."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from command import headwater
from listening import Process

from headwater.backends.native import engine
from headwater.backends.router.engine import RouterEngine
from headwater.cli.route import connector
from headwater.config.schema import EngineConfig
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.engine.engine import Engine
from headwater.models.load import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("route")]

MODEL = "tiny:qwen3"
LIMIT_S = 300.0
ENGINE = ["engine.deterministic=true", "engine.kv_cache_gib=0.02", "engine.max_prefill_tokens=64"]
CONFIG = EngineConfig(deterministic=True, kv_cache_gib=0.02, max_prefill_tokens=64)


def serve(port: int = 0) -> Process:
    return Process("serve", MODEL, "--port", port, "--device", "cpu", "--threads", 1, *ENGINE)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Process]]:
    with ThreadPoolExecutor(2) as threads:
        started = list(threads.map(lambda _: serve(), range(2)))
    yield started
    for each in started:
        each.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Callable[[list[ModelRequest]], list[ModelResponse]]]:
    """What an engine in this process answers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    here = Engine.load(MODEL, CONFIG, device="cpu")
    yield here.generate
    here.close()
    torch.set_num_threads(before)


NUM_TOKENS = 200
"""The router learns every second how many requests run, so they must run for several seconds, as they do in the
deterministic mode."""


def request(key: int, num_tokens: int = NUM_TOKENS) -> ModelRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_end=True)
    return ModelRequest(f"r{key}", (5, 6, 7 + key), sampling, key, session=f"episode {key}")


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_server_killed_under_load_loses_no_token_and_comes_back(servers, undisturbed):
    connect = connector("native", MODEL, load_tokenizer(MODEL))
    router = RouterEngine([connect(each.url) for each in servers])
    asked = [request(key) for key in range(12)]
    try:

        async def scene() -> list[ModelResponse]:
            tasks = [asyncio.create_task(router.agenerate(each)) for each in asked]
            await asyncio.to_thread(until, lambda: router.status().num_running == len(asked), "the requests run")
            await asyncio.to_thread(servers[0].end, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)

        responses = asyncio.run(scene())
        for expected, response in zip(undisturbed(asked), responses, strict=True):
            assert response.output_tokens == expected.output_tokens
            assert response.output_logprobs == pytest.approx(expected.output_logprobs, abs=1e-5)
        status = router.status()
        assert [each.is_alive for each in status.servers] == [False, True]
        assert status.metrics["router_num_requests_moved"] == 6
        servers[0] = serve(servers[0].port)
        until(lambda: router.status().servers[0].state == "serving", "it does not come back")
        # The turns of a session go to one server, and new sessions to both.
        turns = [request(key, 2) for key in range(4)]
        for _ in range(2):
            for each in turns:
                asyncio.run(router.agenerate(each))
        assert router.status().metrics["router_num_sticky"] >= len(turns)
    finally:
        router.close()


def test_streams_on_a_server_that_hangs_continue_on_another_one(servers, undisturbed, monkeypatch):
    """It is stopped, so its connections stay open and nothing arrives."""
    monkeypatch.setattr(engine, "_METRICS_LIMIT_S", 2.0)
    monkeypatch.setattr(engine, "_SILENT_LIMIT_S", 12.0)
    connect = connector("native", MODEL, load_tokenizer(MODEL))
    router = RouterEngine([connect(each.url) for each in servers])
    asked = [request(key) for key in range(8)]

    async def follow(each: ModelRequest) -> tuple[int, ...]:
        tokens: list[int] = []
        async for delta in router.astream(each):
            tokens += delta.tokens
        assert delta.stop_reason == "length"
        return tuple(tokens)

    async def scene() -> list[tuple[int, ...]]:
        streams = [asyncio.create_task(follow(each)) for each in asked[:4]]
        whole = [asyncio.create_task(router.agenerate(each)) for each in asked[4:]]
        await asyncio.to_thread(until, lambda: router.status().num_running == len(asked), "the requests run")
        servers[0].send(signal.SIGSTOP)
        try:
            tokens = await asyncio.wait_for(asyncio.gather(*streams), LIMIT_S)
            responses = await asyncio.wait_for(asyncio.gather(*whole), LIMIT_S)
        finally:
            servers[0].send(signal.SIGCONT)
        return [*tokens, *(each.output_tokens for each in responses)]

    try:
        assert asyncio.run(scene()) == [each.output_tokens for each in undisturbed(asked)]
        assert router.status().metrics["router_num_requests_moved"] == 4
        until(lambda: router.status().servers[0].state == "serving", "it does not come back")
    finally:
        router.close()


def test_the_command_is_an_endpoint_over_its_servers(servers, undisturbed):
    router = Process("route", servers[0].url, "http://127.0.0.1:9", "--model", MODEL, "--port", 0)
    try:
        body = {"model": MODEL, "prompt": "12+34=", "max_tokens": 96, "seed": 3, "prompt_cache_key": "chat 7"}
        status, whole = router.call("/v1/completions", body)
        assert status == 200, whole
        assert router.call("/v1/completions", body)[1]["choices"] == whole["choices"], "the seed decides"
        _, stream = router.call("/v1/completions", {**body, "stream": True})
        chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert len(chunks) > 3, "tokens arrive one after the other"
        assert "".join(each["choices"][0]["text"] for each in chunks) == whole["choices"][0]["text"]

        status, answer = router.call("/servers", {"url": servers[1].url})
        assert [each["state"] for each in answer["servers"]] == ["serving", "serving"], answer
        assert router.call("/servers", {"url": servers[1].url})[0] == 409
        assert router.call("/servers/drain", {"name": "nobody"})[0] == 404
        assert router.call("/servers", {"url": "http://127.0.0.1:9"})[0] == 400
        assert router.call("/servers/remove", {"name": servers[0].url, "move": True})[0] == 200
        assert router.call("/servers/remove", {"name": servers[1].url})[1]["error"]["code"] == "last_server"
        assert router.call("/servers", {"url": servers[0].url})[0] == 200

        with ThreadPoolExecutor(12) as threads:
            long = {**body, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            calls = [threads.submit(router.call, "/v1/completions", {**long, "seed": seed}) for seed in range(12)]
            until(lambda: router.call("/metrics.json")[1]["num_running"] >= 8, "the requests run")
            drained = router.call("/servers/drain", {"name": servers[0].url, "move": True})[1]["servers"]
            assert any(each["state"].startswith("drain") for each in drained)
            answers = [each.result() for each in calls]
        assert all(status == 200 and answer["usage"]["completion_tokens"] == NUM_TOKENS for status, answer in answers)
        text = router.call("/metrics")[1]
        assert f'headwater_server_is_alive{{server="{servers[1].url}"}} 1' in text
        assert router.call("/health")[0] == 200
        assert router.call("/servers/undrain", {"name": servers[0].url})[0] == 200
    finally:
        router.end()


def test_wrong_arguments_are_refused_at_once():
    for arguments, message in (
        (["localhost:8000"], "URL = localhost:8000: must be an address"),
        (["http://127.0.0.1:9", "http://127.0.0.1:9"], "is given twice"),
        (["http://127.0.0.1:9"], "no server answers (http://127.0.0.1:9: "),
        (["http://127.0.0.1:9", "--max-open", "0"], "--max-open = 0: must be >= 1"),
    ):
        result = headwater("route", *arguments)
        assert result.code != 0
        assert message in result.stderr
