"""The vLLM backend without vLLM: its messages, and an engine over a server that plays recorded exchanges.

``tests/integration/test_vllm_server.py`` uses a real server.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from patience import long_enough
from player import serving
from tiny import model, tokenizer

from headwater.backends import BackendContext
from headwater.backends.remote import servers
from headwater.backends.remote import session as session_module
from headwater.backends.remote.http import read_metrics
from headwater.backends.remote.link import Garbage, LinkLost, Sending, ServerInfo, Span, StreamedTokens
from headwater.backends.remote.media import MediaPrompt
from headwater.backends.remote.model import RunModel
from headwater.backends.remote.requests import OpenRequest, check_prompt
from headwater.backends.vllm.adapters import check_adapters
from headwater.backends.vllm.engine import VllmEngine, logprobs_problem
from headwater.backends.vllm.http import INSIDE, OWN_WORKER
from headwater.backends.vllm.inprocess import InProcessLink
from headwater.backends.vllm.launch import command
from headwater.backends.vllm.wire import ADAPTERS, dialect_of, read_event, write_request
from headwater.cli.route import find_model
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, LogitsBroken, RequestError, RolloutFailed, ServerLost
from headwater.core.media import MediaBlock, MediaContent, PlacedMedia
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams
from headwater.models.device import with_dtype
from headwater.observe.spans import Spans

EXCHANGES = Path(__file__).parent / "vllm_exchanges"
NO_BIAS = "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
TOKENS = (495, 249, 11, 382, 24, 87, 91, 448, 157, 347)


def events(name: str) -> list[str]:
    lines = (EXCHANGES / f"{name}.txt").read_text().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]


def request(count: int = 10, **fields: Any) -> ModelRequest:
    return ModelRequest("one", (5, 6, 7), SamplingParams(count, **fields), rng_key=5)


def context(*settings: str) -> BackendContext:
    base = ["rollout.backend=vllm", "rollout.max_new_tokens=16", "model.device=cpu", *settings]
    return BackendContext(with_dtype(load_config("quickstart", base).config), "tiny:qwen3", tokenizer(), Spans())


# Messages


def test_both_forms_of_answers_are_read() -> None:
    for version in ("0.32", "0.23"):
        chunks = [read_event(event, dialect_of(version)) for event in events(version)]
        assert tuple(token for chunk in chunks for token in chunk.tokens) == TOKENS
        assert chunks[0].logprobs == (-6.023831844329834,)
        assert [chunk.stop_reason for chunk in chunks] == [None, None, "length"]
        assert chunks[-1].spans == ((Span("default", 0, 10),) if version == "0.32" else ())
    with pytest.raises(RequestError, match="out of vocabulary"):
        read_event(events("0.32-refused")[0], dialect_of("0.32"))
    with pytest.raises(RolloutFailed, match="not supported"):
        dialect_of("0.11.2")


def test_garbage_is_named() -> None:
    good = events("0.32")[0]
    for bad in (
        "{}",
        "[1]",
        "hello",
        good.replace('"token_id":495', '"token_id":494'),
        '{"choices":[{"token_ids":[1]}]}',
    ):
        with pytest.raises(Garbage):
            read_event(bad, dialect_of("0.32"))
    with pytest.raises(LogitsBroken, match="-9999"):
        read_event(good.replace("-6.023831844329834", "-9999.0"), dialect_of("0.32"))


def test_a_continued_request_asks_for_the_rest() -> None:
    whole = request(10, temperature=0.7, min_new_tokens=4, stop_token_ids=(9,))
    rest = replace(whole, given_tokens=(1, 2, 3))
    first, second = (write_request(Sending(each, (0,), "run-7"), dialect_of("0.32")) for each in (whole, rest))
    assert second["token_ids"] == [5, 6, 7, 1, 2, 3]
    params = second["sampling_params"]
    assert (params["max_tokens"], params["min_tokens"], params["stop_token_ids"]) == (7, 1, [0, 9])
    assert params["seed"] != first["sampling_params"]["seed"]
    assert second["cache_salt"] == "run-7"
    assert "stream_interval" not in write_request(Sending(whole), dialect_of("0.23"))["sampling_params"]


def test_requests_name_the_adapters_of_the_run_if_the_server_has_them() -> None:
    beside, alone = (write_request(Sending(request(), has_adapters=each), dialect_of("0.32")) for each in (True, False))
    assert beside == {**alone, "model": ADAPTERS}


def test_a_server_of_a_run_that_publishes_adapters_computes_them(tmp_path: Path) -> None:
    adapters = ("lora.rank=12", "rollout.publish=adapter")
    started = command(context(*adapters), tmp_path, ["cpu"])
    options = " ".join(started.arguments)
    assert "--enable-lora --max-lora-rank 16 --max-loras 1" in options
    assert started.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    without = command(context("lora.rank=12"), tmp_path, ["cpu"])
    assert "lora" not in " ".join(without.arguments)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in without.environment
    with pytest.raises(ConfigError, match=r"lora\.rank = 513: .* at most rank 512; use less, or use rollout\.publish"):
        command(context("lora.rank=513", "rollout.publish=adapter"), tmp_path, ["cpu"])


def test_servers_that_cannot_compute_the_adapters_are_refused_with_a_remedy() -> None:
    running = context("lora.rank=12", "rollout.publish=adapter", "rollout.servers=[http://127.0.0.1:1]")
    told: list[Sequence[str]] = []

    class Link:
        async def adapter_problem(self, layers: Sequence[str]) -> str:
            told.append(layers)
            return next(iter(problem_of_layers), "")

    good = replace(read_info_of("0.32.0"), adapter_rank=16, has_own_worker=True, loads_adapters=True)
    problem_of_layers = ["it cannot compute adapters of 1 layers"]
    for info, remedy in (
        (replace(good, version="0.31.2"), "install vLLM 0.32"),
        (replace(good, adapter_rank=0), "start it with --enable-lora --max-lora-rank 16"),
        (replace(good, adapter_rank=8), "rank 8, and lora.rank = 12; start it with --enable-lora"),
        (replace(good, has_own_worker=False), f"--worker-extension-cls {OWN_WORKER} and PYTHONPATH={INSIDE}"),
        (replace(good, loads_adapters=False), "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (good, "of 1 layers; name other layers in lora.targets"),
    ):
        with pytest.raises(ConfigError) as refused:
            asyncio.run(check_adapters(Link(), info, running, RunModel.of(running), "the server"))  # type: ignore[arg-type]
        assert "rollout.publish = adapter: the server: " in str(refused.value)
        assert remedy in str(refused.value)
        assert str(refused.value).endswith(", or use rollout.publish=full")
    problem_of_layers.clear()
    asyncio.run(check_adapters(Link(), good, running, RunModel.of(running), "the server"))  # type: ignore[arg-type]
    assert set(told[-1]) == {name for name, _ in model().named_modules() if name.endswith("_proj")}


def read_info_of(version: str) -> ServerInfo:
    return ServerInfo(
        version=version, model="", dtype="float32", instance="1", max_model_tokens=64, max_sequences=4, device="cpu",
        labels_tokens=True, can_sleep=False,
    )  # fmt: skip


def test_images_are_sent_beside_a_prompt_with_placeholders() -> None:
    content = MediaContent.of("image", [b"\xff\xd8\xff of a JPEG file"])
    media = (PlacedMedia(content, (MediaBlock(1, 3),)),)
    asked = ModelRequest("one", (5, 9, 9, 9, 6), SamplingParams(10), rng_key=3, given_tokens=(7,), media=media)
    body = write_request(Sending(asked, prompt=MediaPrompt((5, 9, 6), content.frames)), dialect_of("0.32"))
    assert body["token_ids"] == [5, 9, 6, 7]
    url = f"data:image/jpeg;base64,{base64.b64encode(content.frames[0]).decode()}"
    assert body["content_parts"] == [{"type": "image_url", "url": url, "uuid": content.digest}]
    for told, count in (((5, 9, 9, 9, 6, 7), None), (None, 6), (None, None)):
        check_prompt(asked, StreamedTokens(prompt=told, num_prompt=count))
    for told, count in (((5, 9, 9, 6, 7), None), ((5, 9, 9, 9, 6, 8), None), (None, 5)):
        with pytest.raises(RequestError, match="tokens of a prompt with images that has 6 here"):
            check_prompt(asked, StreamedTokens(prompt=told, num_prompt=count))
    event = json.loads(events("0.32")[0])
    chunk = read_event(json.dumps(event | {"prompt_token_ids": [5, 9]}), dialect_of("0.32"))
    assert chunk.prompt == (5, 9)
    assert not dialect_of("0.31").takes_images


def test_tokens_of_unknown_version_are_generated_again() -> None:
    answers: list[object] = []
    opened = OpenRequest(0, request(), answers.append)
    opened.begin(3)
    opened.extend(StreamedTokens((1, 2), (-1.0, -2.0)))
    opened.weights_change()
    opened.extend(StreamedTokens((3,), (-3.0,)))
    assert opened.partial().output_tokens == (1, 2)
    opened.extend(StreamedTokens((3, 4), (-3.0, -4.0)))
    opened.end_stream((Span("3", 0, 3), Span("4", 3, 4)), {"3": 3, "4": 4}.get)
    assert opened.versions == [3, 3, 3, 4]
    opened.begin(4)
    opened.extend(StreamedTokens((5,), (-5.0,)))
    opened.end_stream((Span("4", 0, 1),), {"4": 4}.get)
    assert (opened.tokens, opened.versions) == ([1, 2, 3, 4, 5], [3, 3, 3, 4, 4])
    with pytest.raises(Garbage, match="did not publish"):
        opened.end_stream((Span("else", 0, 1),), {"4": 4}.get)


def test_logprobs_of_another_distribution_are_refused() -> None:
    plain, greedy = SamplingParams(4), SamplingParams(4, temperature=0.0)
    others = [
        SamplingParams(4, 0.5),
        SamplingParams(4, top_k=3),
        SamplingParams(4, top_p=0.9),
        SamplingParams(4, min_p=0.1),
    ]
    assert [logprobs_problem("raw_logprobs", each) is None for each in (plain, greedy, *others)] == [True, True] + [
        False
    ] * 4
    assert all(logprobs_problem("processed_logprobs", each) is None for each in (plain, greedy, *others))
    assert "processed_logprobs" in (logprobs_problem("raw_logits", plain) or "")


def test_the_command_of_a_server() -> None:
    settings = ("rollout.placement=disaggregated", f"rollout.launch.python={sys.executable}", "engine.max_sequences=32")
    how = command(context(*settings, "rollout.launch.args=[--swap,x]"), Path("/models/one"), ["cpu"])
    text = " ".join(how.arguments)
    assert "--model /models/one" in text
    assert "--max-num-seqs 32" in text
    assert "--logprobs-mode processed_logprobs" in text
    assert text.endswith("--enforce-eager --swap x")
    assert how.environment["VLLM_SERVER_DEV_MODE"] == "1"
    gpus = command(context(*settings), Path("/models/one"), ["cuda:2", "cuda:3"])
    assert "--tensor-parallel-size 2" in " ".join(gpus.arguments)
    assert gpus.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    missing = "rollout.launch.python=/no/such/python"
    with pytest.raises(ConfigError, match="no such program"):
        command(context("rollout.placement=disaggregated", missing), Path("/m"), ["cpu"])
    with pytest.raises(ConfigError, match=r"rollout\.launch\.python"):
        InProcessLink.start(context(), Path("/m"))


def test_a_server_beside_the_learner_can_sleep_if_they_take_turns() -> None:
    turns = ("cluster=ray", "learner.offload_during_rollout=true")

    def num_flags(*settings: str, device: str = "cuda:0", shares_device: bool = True) -> int:
        how = command(context(*settings), Path("/models/one"), [device], shares_device=shares_device)
        return how.arguments.count("--enable-sleep-mode")

    assert num_flags(*turns) == 1
    assert num_flags(*turns, "rollout.launch.args=[--enable-sleep-mode]") == 1, "given by the user"
    assert num_flags("cluster=ray") == num_flags(*turns, shares_device=False) == 0
    assert num_flags(*turns, device="cpu") == 0, "vLLM refuses it there"
    with pytest.raises(ConfigError, match=r"offload_during_rollout = true: the vLLM server .* on a GPU, .* use false"):
        VllmEngine.launch(context(*turns), ["cpu"])


# An engine over a server that plays recorded exchanges


class Player:
    """Answers like vLLM 0.32, with the recorded tokens. ``faults`` are played first."""

    def __init__(self) -> None:
        self.label = "default"
        self.instance = "1"
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.faults: list[Callable[[web.StreamResponse, list[str]], Any]] = []
        self.is_healthy = True
        self.vocabulary = 512
        self.speculates = False
        self.texts: dict[str, Any] = {}
        self.receives_weights = False

    async def control(self, asked: web.Request) -> web.Response:
        path = asked.path
        if path == "/health" and not self.is_healthy:
            await asyncio.sleep(60)
        if path in ("/health", "/version", "/pause", "/resume"):
            if path in ("/pause", "/resume"):
                self.calls.append(path + asked.query.get("mode", ""))
            return web.json_response({"version": "0.32.0"})
        body = await asked.json()
        if path == "/update_weight_version":
            self.label = body["new_version"]
        elif body["method"] == "headwater_describe":
            sizes = {"max_model_len": 64, "logprobs_mode": "processed_logprobs", "enable_sleep_mode": False}
            described = {
                "instance_id": self.instance,
                "model_config": {"model": "/elsewhere", "dtype": "torch.float32", **sizes, **self.texts},
                "scheduler_config": {"max_num_seqs": 8},
                "device_config": {"device": "cpu"},
                "parallel_config": {"worker_extension_cls": "headwater_vllm_worker.Worker", "data_parallel_size": 1},
                "headwater": {"receives_weights": self.receives_weights},
            }
            return web.json_response({"results": [{**described, "call": body["kwargs"]["call"]}]})
        else:
            self.calls.append(body["method"])
            return web.json_response({"results": [{"call": body["kwargs"].get("call")}]})
        return web.json_response({})

    async def generate(self, asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(asked)
        biased = body["sampling_params"].get("logit_bias", {})
        if any(int(each) >= self.vocabulary for each in biased):
            await reply.write((EXCHANGES / "0.32-refused.txt").read_bytes())
            return reply
        if biased and self.speculates:
            await reply.write(f"data: {json.dumps({'error': {'message': NO_BIAS, 'code': 400}})}\n\n".encode())
            return reply
        assert max(body["token_ids"]) < self.vocabulary, "vLLM 0.23 ends at the token after the last one"
        lines = [f"data: {each}\n\n".replace('"default"', f'"{self.label}"') for each in events("0.32")]
        if body["request_id"] != "headwater-probe":
            self.bodies.append(body)
            if self.faults:
                await self.faults.pop(0)(reply, lines)
                return reply
            num_given = len(body["token_ids"]) - 3
            if num_given == 1:  # the rest of the recorded response
                lines = [lines[1], lines[2].replace('"end":10', '"end":9')]
        await reply.write("".join([*lines, "data: [DONE]\n\n"]).encode())
        return reply

    def serving(self) -> AbstractContextManager[str]:
        return serving(web.post("/inference/v1/generate", self.generate), web.route("*", "/{path:.*}", self.control))


@contextmanager
def connected(player: Player, *settings: str) -> Iterator[VllmEngine]:
    with player.serving() as url:
        engine = VllmEngine.connect(url, context(f"rollout.servers=[{url}]", *settings))
        try:
            assert engine.status().needs_weights
            engine.update_weights(WeightUpdate.of(1, model().named_parameters())).result(60)
            yield engine
        finally:
            engine.close()


def ask(engine: VllmEngine, asked: ModelRequest) -> ModelResponse:
    return asyncio.run(engine.agenerate(asked))


async def follow(engine: VllmEngine, asked: ModelRequest) -> list[Delta]:
    return [delta async for delta in engine.astream(asked)]


def test_a_broken_stream_continues_after_the_tokens_that_arrived() -> None:
    player = Player()

    async def breaks(reply: web.StreamResponse, lines: list[str]) -> None:
        await reply.write(lines[0].encode())
        reply._req.transport.close()

    async def aborts(reply: web.StreamResponse, lines: list[str]) -> None:
        final = lines[0].replace('"finish_reason":null', '"finish_reason":"abort"')
        span = '"weight_versions":[{"version":"1","start":0,"end":1}]'
        await reply.write((final.replace('"weight_versions":null', span) + "data: [DONE]\n\n").encode())

    with connected(player) as engine:
        assert player.calls == ["/resume", "/pausekeep", "headwater_reload", "/resume"]
        assert ask(engine, request()).output_tokens == TOKENS
        for fault in (breaks, aborts):
            player.faults.append(fault)
            response = ask(engine, request())
            assert response.output_tokens == TOKENS
            assert set(response.output_versions) == {1}
            assert player.bodies[-1]["token_ids"] == [5, 6, 7, TOKENS[0]]
            assert player.bodies[-1]["sampling_params"]["max_tokens"] == 9
        player.faults.append(breaks)
        deltas = asyncio.run(follow(engine, request()))
        assert tuple(token for delta in deltas for token in delta.tokens) == TOKENS
        assert deltas[0].tokens == TOKENS[:1], "tokens are passed on as they arrive"
        assert [delta.stop_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert (deltas[-1].stop_reason, deltas[1].versions[0]) == ("length", 1)
        with pytest.raises(RequestError, match="vocabulary"):
            ask(engine, ModelRequest("two", (512,), SamplingParams(4), rng_key=0))


def test_another_vocabulary_is_refused_without_a_token_that_could_end_the_server() -> None:
    player = Player()
    for player.vocabulary, how in ((511, "smaller"), (513, "larger")):
        with player.serving() as url, pytest.raises(ConfigError, match=f"its vocabulary is {how} than 512"):
            VllmEngine.connect(url, context(f"rollout.servers=[{url}]"))


def test_a_router_finds_the_model_that_a_server_names() -> None:
    async def models(asked: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served", "root": "/models/one"}]})

    with serving(web.get("/v1/models", models)) as url:
        assert find_model([url], "") == "/models/one"


def test_a_server_that_decodes_speculatively_is_used() -> None:
    """It refuses every bias, also those that ask for the size of its vocabulary."""
    player = Player()
    player.speculates = True
    with connected(player) as engine:
        assert ask(engine, request()).output_tokens == TOKENS
    player.vocabulary = 511
    with player.serving() as url, pytest.raises(ConfigError, match="its vocabulary is smaller than 512"):
        VllmEngine.connect(url, context(f"rollout.servers=[{url}]"))


def test_another_model_is_refused() -> None:
    player = Player()
    player.texts = {"text_config": {"hidden_size": 4096}}
    with player.serving() as url, pytest.raises(ConfigError, match="hidden_size is 4096"):
        VllmEngine.connect(url, context(f"rollout.servers=[{url}]"))


def test_bad_answers_are_named_errors() -> None:
    player = Player()

    async def talks(reply: web.StreamResponse, lines: list[str]) -> None:
        await reply.write(b"data: hello\n\n")

    async def mislabels(reply: web.StreamResponse, lines: list[str]) -> None:
        await reply.write("".join(lines).replace('"version":"1"', '"version":"9"').encode())

    async def breaks(reply: web.StreamResponse, lines: list[str]) -> None:
        reply._req.transport.close()

    with connected(player) as engine:
        for fault, words in ((talks, "cannot be used"), (mislabels, "did not publish")):
            player.faults.append(fault)
            with pytest.raises(RolloutFailed, match=words):
                ask(engine, request())
        player.faults += [breaks] * 4
        with pytest.raises(RolloutFailed, match="without a new token"):
            ask(engine, request())


def test_a_server_that_stops_answering_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr("headwater.backends.remote.http._HEALTH_LIMIT_S", 0.1)

    def check(limit_s: float) -> None:
        player = Player()

        async def hangs(reply: web.StreamResponse, lines: list[str]) -> None:
            player.is_healthy = False
            await asyncio.sleep(60)

        with connected(player, f"rollout.server_timeout_s={limit_s}") as engine:
            player.faults.append(hangs)
            with pytest.raises(RolloutFailed, match="cannot be reached"):
                ask(engine, request())
            assert not engine.status().is_alive

    long_enough(check, 0.5, 10.0)


def test_a_server_that_was_restarted_gets_the_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr("headwater.backends.remote.http._HEALTH_LIMIT_S", 3.0)
    player = Player()

    async def restarts(reply: web.StreamResponse, lines: list[str]) -> None:
        await reply.write(lines[0].encode())
        with monkeypatch.context() as patched:  # before and after, a busy machine may take longer to answer
            patched.setattr("headwater.backends.remote.http._HEALTH_LIMIT_S", 0.1)
            player.is_healthy, player.instance, player.label = False, "2", "default"
            while engine.status().is_reachable and not engine.status().num_restarts:  # noqa: ASYNC110  until noticed
                await asyncio.sleep(0.01)
            player.is_healthy = True
        await asyncio.sleep(60)

    with connected(player) as engine:
        player.faults.append(restarts)
        response = ask(engine, request())
        assert response.output_tokens == TOKENS
        assert set(response.output_versions) == {1}
        assert (engine.status().num_restarts, player.calls[-1], player.label) == (1, "headwater_reload", "1")


def test_a_run_without_room_for_slots_is_refused_or_uses_files(monkeypatch, caplog) -> None:
    player = Player()
    player.receives_weights = True
    little = SimpleNamespace(f_bavail=1, f_blocks=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: little)
    asked = "rollout.weight_transfer=shared_memory"
    with pytest.raises(ConfigError, match=r"need .* MiB of /dev/shm.*docker run --shm-size"), connected(player, asked):
        pass
    with connected(player) as engine:
        assert engine.capabilities.file_weights
    assert "weights travel through files" in caplog.text


def test_a_server_that_is_restarted_without_our_methods_gets_the_weights_in_a_file() -> None:
    player = Player()
    with connected(player) as engine:
        info = engine._session.info
        assert info is not None
        engine._session.info = replace(info, instance="2", receives_weights=True)
        assert not engine.capabilities.file_weights
        slots = engine._stream
        assert engine._stream is slots, "it is kept for the next updates"
        engine._session.info = replace(info, instance="3", receives_weights=True)
        assert engine._stream is slots, "also to a process that takes weights in the same way"
        engine._session.info = info
        assert engine.capabilities.file_weights
        player.calls.clear()
        engine.update_weights(WeightUpdate.of(2, model().named_parameters())).result(60)
        assert "headwater_reload" in player.calls
        assert not engine._replaced


def test_the_metrics_of_a_server_get_our_names():
    text = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 60.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40.0
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0
vllm:num_preemptions_total{engine="0",model_name="m"} odd
"""
    assert read_metrics(text) == {
        "kv_used": 0.5, "num_tokens_cached": 40.0, "num_tokens_generated": 7.0, "num_tokens_prefilled": 120.0,
    }  # fmt: skip
    sglang = 'sglang:token_usage{model_name="m"} 0.28\nsglang:cached_tokens_total{model_name="m"} 3.0\n'
    assert read_metrics(sglang) == {"kv_used": 0.28, "num_tokens_cached": 3.0}
    assert read_metrics("<html>") == {}


class DeadLink:
    """vLLM in this process, whose engine fails with its first request."""

    async def describe(self) -> ServerInfo:
        return ServerInfo("0.32.0", "m", "float32", "here", 64, 8, "cpu", labels_tokens=True, can_sleep=False)

    async def set_label(self, label: str) -> bool:
        return True

    async def stream(self, sending: Sending) -> AsyncIterator[StreamedTokens]:
        yield StreamedTokens((7,), (-1.0,))
        raise LinkLost("vLLM's engine has failed")

    async def check_alive(self) -> None:
        raise LinkLost("vLLM's engine has failed")

    async def close(self) -> None:
        pass


def test_a_failed_engine_in_this_process_is_a_lost_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessLink, "start", lambda *_: DeadLink())
    engine = VllmEngine.from_context(context())
    try:
        assert engine.status().is_alive
        with pytest.raises(ServerLost, match=r"not started again: resume the run, or use rollout\.placement"):
            ask(engine, request())
        assert not engine.status().is_alive
        with pytest.raises(ServerLost):
            ask(engine, request())
    finally:
        engine.close()


def child_module() -> Any:
    spec = importlib.util.spec_from_file_location("headwater_server_child", servers._CHILD)
    assert spec is not None
    assert spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    return child


def test_a_port_that_is_opened_late_is_not_one_that_the_system_gives_to_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = child_module()
    known = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(known.read_text().split()[0]) if known.exists() else 32_768
    if first <= 10_000:
        pytest.skip("on this machine, clients get all ports")
    port = child._unused_port()
    assert 10_000 <= port < first
    with socket.create_server(("127.0.0.1", port)):
        chosen = iter((port, port + 1))
        monkeypatch.setattr(child.random, "randrange", lambda *_: next(chosen, 0))
        assert child._unused_port() != port


def test_the_line_that_a_server_is_ready_is_found_although_vllm_changes_what_is_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.23 puts the process id before every line that is written to ``sys.stdout``."""
    child = child_module()
    plain = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: plain(f"(APIServer pid=1) {text}"))
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        server.RequestHandlerClass.do_GET = lambda self: (self.send_response(200), self.end_headers())  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        child._announce(server.server_port)
        thread.join(60)
    found = servers._READY.search(capfd.readouterr().out)
    assert found is not None
    assert found[1] == f"http://127.0.0.1:{server.server_port}"
