"""The server over other engines: the transformers backend, and a class that has only the protocol's methods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import tiny
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import save_file

import headwater
from headwater.backends.hf import HfEngine
from headwater.config.schema import EngineConfig
from headwater.core.capabilities import ALL_TAGS, Capabilities, EngineStatus, MemoryTag, UpdateMode
from headwater.core.errors import RequestError
from headwater.core.new_tokens import NewTokens
from headwater.core.protocols import EngineLimits, InferenceEngine, WeightUpdate, whole_response
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams
from headwater.models.checksum import checksum
from headwater.serving.app import build_app
from headwater.serving.options import ServerOptions

NAME = "monotone"
LETTER = tiny.tokenizer().encode("b")[0]
LIMIT_S = 120.0
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class MonotoneEngine:
    """Generates one letter again and again. It has the methods of ``InferenceEngine`` and nothing else."""

    def __init__(self) -> None:
        self._version = 3
        self._is_paused = False
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            resumable=False, checksums=False, streaming=False, memory_tags=("weights",), update_modes=("drain",)
        )

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(vocab_size=512, max_model_tokens=64, max_request_tokens=64, max_queue=4)

    def status(self) -> EngineStatus:
        return EngineStatus(self._version, num_waiting=len(self._waiting), is_paused=self._is_paused)

    def check(self, request: ModelRequest) -> None:
        if len(request.input_tokens) + request.sampling.max_new_tokens > 64:
            raise RequestError("too long")

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.check(request)
        if self._is_paused:
            self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[request.request_id]
            finally:
                del self._waiting[request.request_id]
            return ModelResponse(request.input_tokens, (), (), (), "abort")
        count = request.sampling.max_new_tokens
        tokens = (LETTER,) * count
        return ModelResponse(request.input_tokens, tokens, (-0.5,) * count, (self._version,) * count, "length")

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        return whole_response(self, request)

    def abort(self, request_id: str | None = None) -> int:
        wanted = [each for name, each in self._waiting.items() if request_id in (None, name)]
        for each in wanted:
            each.get_loop().call_soon_threadsafe(each.set_result, None)
        return len(wanted)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        self._version = update.version
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version

    def weights_checksum(self) -> str:
        raise AssertionError("the capabilities exclude checksums")

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        assert tuple(tags) == ("weights",)

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        assert tuple(tags) == ("weights",)

    def close(self) -> None: ...


class Calls:
    """A client of a server in this process."""

    def __init__(self, client: TestClient[Any, Any]) -> None:
        self.client = client

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.client.post(path, json=body) as reply:
            return reply.status, json.loads(await reply.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as reply:
            return reply.status, json.loads(await reply.read())

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, without the end mark."""
        async with self.client.post(path, json={**body, "stream": True}) as reply:
            assert reply.status == 200, await reply.text()
            parts = (await reply.text()).split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@asynccontextmanager
async def serving(engine: InferenceEngine) -> AsyncIterator[Calls]:
    app = build_app(engine, tiny.tokenizer(), ServerOptions(NAME))
    async with TestClient(TestServer(app)) as client:
        yield Calls(client)


def run(engine: InferenceEngine, scenario: Callable[[Calls], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(LIMIT_S), serving(engine) as calls:
            await scenario(calls)

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  the engine's counters cannot be awaited
        await asyncio.sleep(0.005)


# An engine that has only the protocol's methods


def test_every_api_generates():
    async def scenario(calls: Calls) -> None:
        text = {"prompt": "ab", "max_tokens": 3}
        status, body = await calls.post("/v1/completions", text)
        assert (status, body["choices"][0]["text"], body["system_fingerprint"]) == (200, "bbb", "version-3")
        status, body = await calls.post("/v1/chat/completions", CHAT)
        assert (status, body["usage"]["completion_tokens"]) == (200, 4)
        status, body = await calls.post("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 2}})
        assert (status, body["text"], body["meta_info"]["output_versions"]) == (200, "bb", [3, 3])
        native = {"input_tokens": [7, 9], "rng_key": 1, "sampling": {"max_new_tokens": 2}}
        status, body = await calls.post("/headwater/generate", native)
        assert (status, body["tokens"], body["stop_reason"]) == (200, [LETTER, LETTER], "length")

    run(MonotoneEngine(), scenario)


def test_a_stream_is_one_chunk():
    async def scenario(calls: Calls) -> None:
        (chunk,) = await calls.events("/v1/completions", {"prompt": "ab", "max_tokens": 3})
        assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("bbb", "length")
        role, content, end = await calls.events("/v1/chat/completions", CHAT)
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert content["choices"][0]["delta"]["content"]
        assert end["choices"][0]["finish_reason"] == "length"
        (event,) = await calls.events("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 2}})
        assert event["text"] == "bb"

    run(MonotoneEngine(), scenario)


def test_what_the_engine_cannot_do_is_answered_with_501():
    native = {"input_tokens": [7], "given_tokens": [9], "rng_key": 1, "sampling": {"max_new_tokens": 2}}
    update = {"version": 4, "mode": "interrupt", "source": {"file": "x"}}
    refused = [
        ("/control/sleep", {}, "tags: this engine cannot release kv_cache; use weights"),
        ("/control/wake", {"tags": ["kv_cache"]}, "cannot release kv_cache"),
        ("/release_memory_occupation", {}, "cannot release kv_cache"),
        ("/resume_memory_occupation", {}, "cannot release kv_cache"),
        ("/control/update_weights", update, "mode: this engine does not support the update mode interrupt"),
        ("/update_weights_from_disk", {"model_path": "x", "flush_cache": False}, "flush_cache: this engine does not"),
        ("/headwater/generate", native, "given_tokens: this engine cannot continue a response"),
    ]

    async def scenario(calls: Calls) -> None:
        for path, body, message in refused:
            status, answer = await calls.post(path, body)
            assert (status, answer["error"]["code"]) == (501, "unsupported_by_engine"), path
            assert message in answer["error"]["message"], path
        status, answer = await calls.get("/control/checksum")
        assert (status, answer["error"]["code"]) == (501, "unsupported_by_engine")
        async with calls.client.ws_connect("/headwater/connect") as socket:
            await socket.send_json({"id": 1, "request": native})
            (line,) = await socket.receive_json(timeout=LIMIT_S)
            assert line["error"]["code"] == "unsupported_by_engine"
        assert await calls.post("/control/sleep", {"tags": ["weights"]}) == (200, {"asleep": ["weights"]})
        assert await calls.post("/control/wake", {"tags": ["weights"]}) == (200, {"awake": ["weights"]})

    run(MonotoneEngine(), scenario)


def test_an_engine_that_only_streams_serves_a_connection_too():
    asked = {"input_tokens": [7], "rng_key": 1, "sampling": {"max_new_tokens": 2}}
    engine = MonotoneEngine()

    async def scenario(calls: Calls) -> None:
        async with calls.client.ws_connect("/headwater/connect") as socket:
            await socket.send_json({"id": 5, "request": asked})
            arrived = [NewTokens.decode(await socket.receive_bytes(timeout=LIMIT_S))]
            while not arrived[-1].ended:
                arrived.append(NewTokens.decode(await socket.receive_bytes(timeout=LIMIT_S)))
            new = NewTokens.join(arrived)
            assert (new.tokens["token"].tolist(), new.tokens["version"].tolist()) == ([LETTER] * 2, [3] * 2)
            assert (new.numbers.tolist(), new.ended) == ([5], [(5, "length")])
            await socket.send_json({"id": 6, "request": {**asked, "sampling": {"max_new_tokens": 64}}})
            [line] = await socket.receive_json(timeout=LIMIT_S)
            assert (line["id"], line["error"]["message"]) == (6, "too long")
            engine.pause()
            await socket.send_json({"id": 7, "request": asked})
            await socket.send_json({"id": 7, "leave": True})  # cancelled before it has started
            await socket.send_json({"id": 8, "request": {**asked, "request_id": "waits"}})
            async with asyncio.timeout(LIMIT_S):
                while "waits" not in engine._waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            engine.abort("waits")
            new = NewTokens.decode(await socket.receive_bytes(timeout=LIMIT_S))
            assert list(new.ended) == [(8, "abort")]
        assert not engine._waiting

    run(engine, scenario)


def test_control_calls_and_information(tmp_path):
    save_file(dict(tiny.model().named_parameters()), tmp_path / "model.safetensors")
    engine = MonotoneEngine()

    async def scenario(calls: Calls) -> None:
        assert await calls.post("/control/version", {"version": 8}) == (200, {"version": 8})
        source = {"version": 9, "source": {"file": str(tmp_path)}}
        status, body = await calls.post("/control/update_weights", source)
        assert (status, body["version"]) == (200, 9)
        status, body = await calls.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
        assert (status, body["success"], engine.get_version()) == (200, True, 10)
        for path in ("/health", "/health_generate"):
            assert await calls.get(path) == (200, {"status": "ok"})
        _, info = await calls.get("/get_server_info")
        assert (info["context_length"], info["vocab_size"], info["max_queue"]) == (64, 512, 4)
        assert info["capabilities"]["update_modes"] == ["drain"]
        assert (await calls.get("/get_model_info"))[1]["model_path"] == NAME
        _, metrics = await calls.get("/metrics.json")
        assert (metrics["version"], metrics["is_paused"], metrics["num_running"]) == (10, False, 0)
        async with calls.client.get("/metrics") as reply:
            assert "headwater_version 10" in await reply.text()

    run(engine, scenario)


def test_pausing_and_aborting():
    engine = MonotoneEngine()

    async def scenario(calls: Calls) -> None:
        assert await calls.post("/control/pause", {}) == (200, {"is_paused": True})
        assert (await calls.get("/health_generate"))[1]["error"]["code"] == "paused"
        asked = asyncio.ensure_future(calls.post("/generate", {"text": ["a", "b"], "rid": "mine"}))
        await until(lambda: engine.status().num_waiting == 2)
        assert await calls.post("/control/abort", {"request_id": "mine"}) == (200, {"num_aborted": 2})
        _, bodies = await asked
        assert [body["meta_info"]["finish_reason"]["type"] for body in bodies] == ["abort", "abort"]
        assert await calls.post("/control/resume", {}) == (200, {"is_paused": False})

    run(engine, scenario)


# The transformers backend


@pytest.fixture(scope="module")
def hf() -> Iterator[HfEngine]:
    config = EngineConfig(max_queue=8)
    engine = HfEngine.load("tiny:qwen3", config, tokenizer=tiny.tokenizer(), device="cpu")
    yield engine
    engine.close()


def test_hf_generates_in_every_api_and_streams_in_one_chunk(hf):
    async def scenario(calls: Calls) -> None:
        text = {"prompt": "12+30=", "max_tokens": 6, "seed": 1, "n": 2, "logprobs": 0, "return_token_ids": True}
        status, whole = await calls.post("/v1/completions", text)
        assert (status, len(whole["choices"])) == (200, 2)
        for choice in whole["choices"]:
            assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
        chunks = await calls.events("/v1/completions", text)
        by_index = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in chunks}
        assert len(chunks) == 2
        assert [by_index[place]["token_ids"] for place in range(2)] == [each["token_ids"] for each in whole["choices"]]
        chat = {**CHAT, "seed": 2, "return_token_ids": True}
        status, whole = await calls.post("/v1/chat/completions", chat)
        assert status == 200
        streamed = await calls.events("/v1/chat/completions", chat)
        tokens = [chunk["choices"][0]["token_ids"] for chunk in streamed if "token_ids" in chunk["choices"][0]]
        assert tokens == [whole["choices"][0]["token_ids"]]
        asked = {"text": "abc", "sampling_params": {"max_new_tokens": 5, "sampling_seed": 4}, "return_logprob": True}
        status, whole = await calls.post("/generate", asked)
        (event,) = await calls.events("/generate", asked)
        assert (status, event["output_ids"]) == (200, whole["output_ids"])

    run(hf, scenario)


def test_hf_has_alternatives_and_refuses_scores_by_name(hf):
    async def scenario(calls: Calls) -> None:
        asked = {
            "prompt": "12+30=",
            "max_tokens": 3,
            "logprobs": 2,
            "logit_bias": {"42": 100},
            "return_token_ids": True,
        }
        status, body = await calls.post("/v1/completions", asked)
        assert status == 200
        (choice,) = body["choices"]
        assert choice["token_ids"] == [42] * 3
        assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"])
        status, body = await calls.post("/v1/completions", {**asked, "echo": True})
        assert (status, body["error"]["code"]) == (501, "unsupported_by_engine")
        assert "prompt_logprobs" in body["error"]["message"]

    run(hf, scenario)


def test_calls_about_tokens(hf):
    async def scenario(calls: Calls) -> None:
        status, body = await calls.post("/tokenize", {"prompt": "12+30=", "return_token_strs": True})
        assert (status, body["count"], "".join(body["token_strs"])) == (200, len(body["tokens"]), "12+30=")
        assert (await calls.post("/detokenize", {"tokens": body["tokens"]}))[1] == {"prompt": "12+30="}
        assert (await calls.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}
        status, body = await calls.post("/tokenize", {"messages": CHAT["messages"]})
        assert (status, body["token_strs"]) == (200, None)
        assert (await calls.get("/tokenizer_info"))[1]["eos_token"] == tiny.tokenizer().eos_token
        assert (await calls.get("/version"))[1] == {"version": headwater.__version__}
        for path, wrong in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/tokenize", {"prompt": 5}),
            ("/detokenize", {"tokens": [512]}),
            ("/detokenize", {"tokens": [1] * 5000}),
        ]:
            assert (await calls.post(path, wrong))[0] == 400, wrong

    run(hf, scenario)


def test_hf_takes_weights_from_a_file(hf, tmp_path):
    other = tiny.model(seed=1)
    save_file({name: each.detach() for name, each in other.named_parameters()}, tmp_path / "model.safetensors")

    async def scenario(calls: Calls) -> None:
        before = (await calls.get("/control/checksum"))[1]["checksum"]
        body = {"version": 5, "mode": "drain", "source": {"file": str(tmp_path)}}
        status, answer = await calls.post("/control/update_weights", body)
        assert (status, answer["version"]) == (200, 5)
        after = (await calls.get("/control/checksum"))[1]["checksum"]
        assert after == checksum(other.named_parameters()) != before
        status, answer = await calls.post("/control/update_weights", {**body, "mode": "in_flight"})
        assert (status, answer["error"]["code"]) == (501, "unsupported_by_engine")
        missing = {"version": 6, "source": {"file": str(tmp_path / "none")}}
        assert (await calls.post("/control/update_weights", missing))[0] == 400
        assert hf.get_version() == 5

    run(hf, scenario)


def test_hf_refuses_aborts_and_reports(hf):
    async def scenario(calls: Calls) -> None:
        status, answer = await calls.post("/v1/completions", {"prompt": "hi", "max_tokens": 5000})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        await calls.post("/control/pause", {})
        asked = [asyncio.ensure_future(calls.post("/generate", {"text": "ab", "rid": str(n)})) for n in range(8)]
        await until(lambda: hf.status().num_waiting == 8)
        status, answer = await calls.post("/generate", {"text": "ab"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert await calls.post("/control/abort", {"request_id": "3"}) == (200, {"num_aborted": 1})
        assert (await asked[3])[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert await calls.post("/control/abort", {"all": True}) == (200, {"num_aborted": 7})
        await asyncio.gather(*asked)
        assert hf.status().num_waiting == 0
        await calls.post("/control/resume", {})
        for path, code in (("/control/sleep", 503), ("/control/wake", 200)):
            assert (await calls.post(path, {}))[0] == 200
            assert (await calls.get("/health_generate"))[0] == code

    run(hf, scenario)


def test_the_hf_engine_refuses_what_it_can_never_serve(hf):
    few = SamplingParams(max_new_tokens=4)
    for tokens, sampling in [
        ((9999,), few),
        ((5,), replace(few, max_new_tokens=5000)),
        ((5,), replace(few, stop_strings=("x",) * 65)),
    ]:
        with pytest.raises(RequestError):
            hf.check(ModelRequest("r", tokens, sampling, 1))
