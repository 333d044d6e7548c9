"""SGLang's exchanges as its documentation and source define them, and its differences between versions."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from backends.group_member import GroupMember
from player import serving
from tiny import model, tokenizer

from headwater.backends import BackendContext
from headwater.backends.fleet import make_fleet
from headwater.backends.launch.child import ChildServer, Command, without_secret
from headwater.backends.remote import group
from headwater.backends.remote import requests as requests_module
from headwater.backends.remote import servers as servers_module
from headwater.backends.remote import session as session_module
from headwater.backends.remote.http import StreamTurns
from headwater.backends.remote.link import STREAM_INTERVAL, Garbage, LinkLost, Overloaded, Sending, Span
from headwater.backends.sglang.engine import SglangEngine, command
from headwater.backends.sglang.wire import DIALECTS, dialect_of, read_answer, read_info, write_request
from headwater.cli.route import find_model
from headwater.config.load import load_config
from headwater.core.errors import (
    ConfigError,
    HeadwaterError,
    LogitsBroken,
    QueueFull,
    RequestError,
    RolloutFailed,
    WeightsIncomplete,
)
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.device import with_dtype
from headwater.observe.spans import Spans
from headwater.weights.publish import publish

ANSWER = {
    "text": " Paris.",
    "output_ids": [12095, 13, 151645],
    "meta_info": {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 5,
        "weight_version": "default",
        "completion_tokens": 3,
        "cached_tokens": 0,
        "e2e_latency": 0.05,
        "output_token_logprobs": [[-0.25, 12095, None], [-1.5, 13, None], [-0.125, 151645, None]],
    },
}
"""A reply of ``/generate`` with ``return_logprob``."""

SERVER = {
    "model_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "context_length": None,
    "dtype": "auto",
    "device": "cuda",
    "random_seed": 987654321,
    "max_running_requests": 256,
    "enable_memory_saver": True,
    "max_req_input_len": 32762,
    "internal_states": [{}],
    "version": "0.5.6.post2",
}
"""The parts of ``/get_server_info`` that matter here."""


def changed(**meta: object) -> str:
    return json.dumps({**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta}})


def test_an_answer_is_read_with_its_tokens_and_how_it_ended():
    chunk = read_answer(json.dumps(ANSWER))
    assert (chunk.tokens, chunk.logprobs, chunk.stop_reason) == ((12095, 13, 151645), (-0.25, -1.5, -0.125), "stop")
    aborted = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
    chunk = read_answer(changed(finish_reason=aborted, output_token_logprobs=[[-0.5, 7, None]]))
    assert (chunk.tokens, chunk.stop_reason) == ((7,), "abort")
    assert read_answer(changed(finish_reason={"type": "length", "length": 3})).stop_reason == "length"
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    chunk = read_answer(changed(weight_version="7", weight_versions=spans))
    assert (chunk.label, chunk.spans) == ("7", (Span("6", 0, 1), Span("7", 1, 3)))


def test_both_forms_of_streams_are_read():
    """Events with the whole response, and those of ``--incremental-streaming-output``."""
    pairs = ANSWER["meta_info"]["output_token_logprobs"]
    for is_whole in (True, False):
        tokens, num_read = [], 0
        for end in (1, 3):
            shown = pairs[: end if is_whole else None][0 if is_whole else num_read : end]
            reason = ANSWER["meta_info"]["finish_reason"] if end == 3 else None
            event = changed(output_token_logprobs=shown, completion_tokens=end, finish_reason=reason)
            chunk = read_answer(event, num_read)
            num_read += len(chunk.tokens)
            tokens += chunk.tokens
            assert chunk.stop_reason == (None if end == 1 else "stop")
        assert tokens == [12095, 13, 151645]


def test_tokens_that_a_stream_repeats_or_leaves_out_are_noticed():
    pairs, aborted = ANSWER["meta_info"]["output_token_logprobs"], {"type": "abort", "status_code": None}
    # The end of a request that was moved back into the queue comes with all tokens, after those that are new.
    event = changed(output_token_logprobs=[*pairs[1:], *pairs], finish_reason=aborted)
    assert read_answer(event, 1).tokens == (13, 151645)
    assert (
        read_answer(changed(output_token_logprobs=pairs[:1], completion_tokens=0, finish_reason=aborted), 2).tokens
        == ()
    )
    with pytest.raises(LinkLost, match="2 tokens of a stream are missing"):
        read_answer(changed(output_token_logprobs=pairs[2:], finish_reason=None), 0)
    assert read_answer(changed(output_token_logprobs=[], finish_reason=aborted), 2).tokens == ()


def test_a_refusal_inside_a_stream_is_that_of_an_answer():
    for status, error in ((400, RequestError), (503, Overloaded), (500, RolloutFailed)):
        ended = {"type": "abort", "message": "no room", "status_code": status}
        with pytest.raises(error, match="no room"):
            read_answer(changed(finish_reason=ended), 0)


def test_garbage_is_named():
    for text in ("<html>", "[]", "null", "{}", changed(finish_reason=1), changed(finish_reason={"type": "?"})):
        with pytest.raises(Garbage):
            read_answer(text)
    for logprob in (float("nan"), 3.0):
        with pytest.raises(LogitsBroken, match="not numbers"):
            read_answer(changed(output_token_logprobs=[[logprob, 7, None]]))
    with pytest.raises(RequestError, match="too long"):
        read_answer(json.dumps({"error": {"message": "The input is too long"}}))


def test_a_request_has_the_names_and_defaults_of_sglang():
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, min_new_tokens=4, stop_token_ids=(3,))
    request = ModelRequest("r1", (5, 6), sampling, rng_key=11, given_tokens=(8,))
    body = write_request(Sending(request, (2,), "run-7", streams=False), DIALECTS[0])
    assert body["extra_key"] == "run-7", "after an update in flight, the cache holds prompts of older weights"
    assert body["rid"].startswith("r1")
    other = write_request(Sending(replace(request, request_id="r10")), DIALECTS[0])
    assert not other["rid"].startswith(body["rid"]), "SGLang aborts all requests whose names begin with the given one"
    assert (body["input_ids"], body["return_logprob"], body["stream"]) == ([5, 6, 8], True, False)
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["min_new_tokens"], params["temperature"]) == (8, 3, 0.7)
    assert (params["top_k"], params["top_p"], params["stop_token_ids"]) == (-1, 1.0, [2, 3])
    assert 0 <= params["sampling_seed"] < 2**31
    assert "stream_interval" not in params
    streamed = write_request(Sending(request, (2,), streams=False), DIALECTS[0], streams_new_tokens=True)
    assert (streamed["stream"], streamed["sampling_params"]["stream_interval"]) == (True, STREAM_INTERVAL)
    older = write_request(Sending(request, (2,)), DIALECTS[-1])
    assert "sampling_seed" not in older["sampling_params"], "an unknown parameter is an error there"


def test_what_differs_between_versions_is_found_by_the_version():
    assert dialect_of("0.5.6.post2").has_pause_modes
    assert dialect_of("0.6.0rc1").labels_tokens
    assert dialect_of("0.5.23").has_update_calls
    assert not dialect_of("0.5.20").has_update_calls
    assert dialect_of("0.5.19").labels_tokens
    assert not dialect_of("0.5.18").labels_tokens
    assert dialect_of("0.5.11").streams_new_tokens
    assert not dialect_of("0.5.10.post1").streams_new_tokens
    assert not dialect_of("0.5.5").has_pause_modes
    assert dialect_of("0.5.3.post1").has_seeds
    assert not dialect_of("0.5.2").has_seeds
    with pytest.raises(RolloutFailed, match=r"SGLang 0\.5\.0 is not supported; install SGLang 0\.5\.1"):
        dialect_of("0.5.0")


def test_what_a_server_tells_about_itself():
    told = {"model_path": SERVER["model_path"], "weight_version": "default"}
    info = read_info(SERVER, told, DIALECTS[1])
    assert (info.max_model_tokens, info.max_sequences, info.can_sleep) == (32762, 256, True)
    assert (info.label, info.num_workers) == ("default", 1)
    for other in ({"random_seed": 1}, {"startup_time": 1.5}):
        assert read_info({**SERVER, **other}, told, DIALECTS[1]).instance != info.instance
    with pytest.raises(LookupError):
        read_info({}, told, DIALECTS[1])
    told = {"model_path": "/weights", "tokenizer_path": "/elsewhere"}
    assert read_info(SERVER, told, DIALECTS[1]).model == "/elsewhere", "its model_path follows the weights"
    assert read_info({**SERVER, "launch_command": "x"}, told, DIALECTS[0]).model == SERVER["model_path"]
    newer = {**SERVER, "version": "0.5.23", "disable_overlap_schedule": False}
    assert not read_info(newer, told, DIALECTS[0]).labels_tokens, "its labels are wrong by one token"
    assert read_info({**newer, "disable_overlap_schedule": True}, told, DIALECTS[0]).labels_tokens
    assert not read_info({**newer, "disable_overlap_schedule": True}, told, DIALECTS[2]).labels_tokens


def test_settings_that_sglang_cannot_have_are_refused_before_a_run_starts():
    near = ["rollout.backend=sglang", "rollout.servers=[http://127.0.0.1:30000]"]
    assert load_config(None, near).config.rollout.backend == "sglang"
    for setting in ("rollout.weight_transfer=shared_memory", "engine.page_tokens=16"):
        with pytest.raises(ConfigError, match=setting.partition("=")[0].replace(".", r"\.")):
            load_config(None, [*near, setting])


def context(*settings: str) -> BackendContext:
    base = ["rollout.backend=sglang", "rollout.max_new_tokens=16", "model.device=cpu", *settings]
    return BackendContext(with_dtype(load_config("quickstart", base).config), "tiny:qwen3", tokenizer(), Spans())


def test_the_command_of_a_server():
    settings = ("rollout.placement=disaggregated", "engine.max_sequences=32", "engine.prefix_cache=false")
    how = command(context(*settings, "rollout.launch.args=[--swap,x]"), Path("/models/one"), ["cpu"], api_key="secret")
    text = " ".join(how.arguments)
    assert "headwater_server_child.py sglang --model-path /models/one" in text
    assert "--max-running-requests 32" in text
    assert text.endswith("--disable-radix-cache --device cpu --swap x")
    assert how.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    in_flight = command(context(*settings, "engine.update_mode=in_flight"), Path("/models/one"), ["cpu"])
    assert "--disable-overlap-schedule" in in_flight.arguments
    assert "secret" not in text
    assert how.environment["HEADWATER_CHILD_KEY"] == "secret"
    gpus = command(context(*settings), Path("/models/one"), ["cuda:2", "cuda:3"], shares_device=True)
    assert "--tp-size 2" in " ".join(gpus.arguments)
    assert "--mem-fraction-static 0.4" in " ".join(gpus.arguments)
    assert gpus.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(ConfigError, match=r"rollout\.placement=disaggregated"):
        SglangEngine.from_context(context())
    # This Python has no SGLang, and the process that starts says so.
    with pytest.raises(RolloutFailed, match=r"has no package sglang; set rollout\.launch\.python"):
        SglangEngine.launch(context("rollout.placement=disaggregated"), ["cpu"])


def test_a_server_beside_the_learner_can_release_memory_if_they_take_turns():
    turns = ("cluster=ray", "learner.offload_during_rollout=true")

    def num_flags(*settings: str, device: str = "cuda:0", shares_device: bool = True) -> int:
        how = command(context(*settings), Path("/models/one"), [device], shares_device=shares_device)
        return how.arguments.count("--enable-memory-saver")

    assert num_flags(*turns) == 1
    assert num_flags(*turns, "rollout.launch.args=[--enable-memory-saver]") == 1, "given by the user"
    assert num_flags("cluster=ray") == num_flags(*turns, shares_device=False) == num_flags(*turns, device="cpu") == 0
    with pytest.raises(
        ConfigError, match=r"offload_during_rollout = true: the SGLang server .* on a GPU, .* use false"
    ):
        SglangEngine.launch(context(*turns), ["cpu"])


def test_a_launched_server_streams_new_tokens_if_its_version_can(monkeypatch):
    spec = importlib.util.spec_from_file_location("headwater_server_child", servers_module._CHILD)
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    option = "--incremental-streaming-output"
    assert child._sglang_options() == [], "SGLang is not installed here"
    for version, expected in (
        ("0.5.23", [option]),
        ("0.5.11.post1", [option]),
        ("0.5.10.post1", []),
        ("1.0", [option]),
    ):
        monkeypatch.setattr(child.importlib.metadata, "version", lambda _, version=version: version)
        assert child._sglang_options() == expected
    monkeypatch.setattr(sys, "argv", ["child", "sglang", option])
    assert child._sglang_options() == [], "the user has given it"


def test_the_key_of_a_server_is_not_in_its_output():
    """SGLang prints all its settings."""
    for split in range(7):
        first, rest = without_secret("key='secret'"[: 5 + split], "secret")
        shown, rest = without_secret(rest + "key='secret'"[5 + split :], "secret")
        assert (first + shown, rest) == ("key='***'", "")
    assert without_secret("the se", "secret") == ("the ", "se")
    printed: list[str] = []
    code = "import os, sys; print('api_key=' + os.environ['KEY'], 'at http://here', flush=True); sys.stdin.read()"
    how = Command([sys.executable, "-c", code], "m", re.compile(r"at (\S+)"), {"KEY": "secret"}, secret="secret")

    async def run() -> str:
        child = await ChildServer.start(how, echo=printed.append)
        await child.stop()
        return child.last_lines

    assert asyncio.run(run()) == "".join(printed).strip() == "api_key=*** at http://here"
    assert command(context(), Path("/m"), ["cpu"], api_key="secret").secret == "secret"


# An engine over a server that plays SGLang


class Player:
    """Answers like SGLang: one response of four tokens. Weights arrive from files and over real process groups."""

    def __init__(self, version: str = "0.5.6.post2") -> None:
        self.version = version
        self.label = "default"
        self.seed = 42
        self.calls: list[str] = []
        self.keys: list[str | None] = []
        """``extra_key`` of the requests."""
        self.member = GroupMember()
        self.before: list[Callable[[], None]] = []
        """Called before the next answers."""
        self.refused: dict[str, list[int]] = {}
        """The status of the next answers of a path."""
        self.held: dict[str, asyncio.Event] = {}
        """Requests that are generated until they are aborted, if ``holds``."""
        self.holds = False
        self.is_paused = False
        self.num_waiting = 0
        """Requests that have arrived since it was paused."""
        self.labels_tokens = False
        self.streams_new_tokens = False
        self.asked: list[list[int]] = []
        """The tokens of the requests."""
        self.breaks = 0
        """How many of the next streams end after their first token, as if the server had died."""
        self.holds_streams = False
        """After its first token, a stream waits until it is aborted."""
        self.on_call: Callable[[str], None] = lambda path: None
        """Called with the path of every call before it is answered."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/generate", self.generate), web.route("*", "/{path:.*}", self.control)]

    async def generate(self, asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        self.keys.append(body.get("extra_key"))
        self.asked.append(body["input_ids"])
        if self.before:
            self.before.pop(0)()
        if self.refused.get("/generate"):
            return web.json_response({}, status=self.refused["/generate"].pop(0))
        self.num_waiting += self.is_paused
        while self.is_paused:  # noqa: ASYNC110  it changes in another call
            await asyncio.sleep(0.005)
        if self.holds:
            aborted = self.held[body["rid"]] = asyncio.Event()
            await aborted.wait()
        count = body["sampling_params"]["max_new_tokens"]
        pairs = [[-0.5, 20 + place, None] for place in range(count)]
        events = [(1, None), (count, {"type": "length", "length": count})]
        if self.holds:
            events, pairs = [(1, {"type": "abort", "message": "Aborted"})], pairs[:1]
        elif self.holds_streams:
            events[1] = (1, {"type": "abort", "message": "Aborted"})
        starts = [0, events[0][0]] if self.streams_new_tokens and body["stream"] else [0, 0]
        bodies = [
            {
                "output_ids": [],
                "meta_info": {
                    "id": body["rid"],
                    "finish_reason": reason,
                    "weight_version": self.label,
                    "completion_tokens": end,
                    "output_token_logprobs": pairs[start:end],
                    "weight_versions": [{"version": self.label, "start": 0, "end": end}]
                    if self.labels_tokens
                    else None,
                },
            }
            for start, (end, reason) in zip(starts, events, strict=False)
        ]
        if not body["stream"]:
            return web.json_response(bodies[-1])
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(asked)
        for each in bodies:
            await reply.write(f"data: {json.dumps(each)}\n\n".encode())
            if self.breaks:
                self.breaks -= 1
                asked.transport.close()
                return reply
            if self.holds_streams and each is bodies[0]:
                aborted = self.held[body["rid"]] = asyncio.Event()
                await aborted.wait()
                self.calls.append("ends")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def control(self, asked: web.Request) -> web.Response:
        path = asked.path
        self.on_call(path)
        if self.refused.get(path):
            return web.json_response({}, status=self.refused[path].pop(0))
        prefix = dialect_of(self.version).info_prefix
        if path.endswith("_info") and path not in (f"{prefix}server_info", f"{prefix}model_info"):
            return web.json_response({"detail": "Not Found"}, status=404)
        if path.endswith("server_info"):
            own = {"version": self.version, "random_seed": self.seed, "disable_overlap_schedule": self.labels_tokens}
            own["incremental_streaming_output"] = self.streams_new_tokens
            return web.json_response({**SERVER, **own, "dtype": "float32"})
        if path.endswith("model_info"):
            told = {"model_path": "/weights", "tokenizer_path": "/elsewhere", "weight_version": self.label}
            return web.json_response(told)
        body = await asked.json()
        self.calls.append(f"{path[1:]} {body.get('weight_version', body.get('mode', ''))}".strip())
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused, self.num_waiting = path == "/pause_generation", 0
        if path == "/abort_request":
            self.held[body["rid"]].set()
        if path == "/init_weights_update_group":
            await self.member.join(body)
        elif path == "/update_weights_from_distributed":
            await self.member.receive(body)
        self.label = body.get("weight_version", self.label)
        if path == "/release_memory_occupation":
            return web.json_response(None)
        return web.json_response({"success": True, "message": ""})


@contextmanager
def connected(player: Player, *settings: str) -> Iterator[SglangEngine]:
    with serving(*player.routes()) as url:
        engine = SglangEngine.connect(url, context(f"rollout.servers=[{url}]", *settings))
        try:
            assert engine.status().needs_weights
            engine.update_weights(WeightUpdate.of(1, model().named_parameters())).result(60)
            yield engine
        finally:
            engine.close()


def ask(engine: SglangEngine) -> ModelResponse:
    return asyncio.run(engine.agenerate(ModelRequest("one", (5, 6, 7), SamplingParams(4), rng_key=5)))


def test_a_restarted_server_is_noticed_and_gets_its_weights_again(monkeypatch):
    """It answers at the same address as before, so no connection breaks."""
    monkeypatch.setattr(session_module, "_HEALTH_EVERY_S", 3600.0)

    def restarts() -> None:
        player.label = "default"

    for version in ("0.5.2", "0.5.6.post2"):
        player = Player(version)
        with connected(player) as engine:
            pause = "pause_generation" if version == "0.5.2" else "pause_generation abort"
            update = [pause, "update_weights_from_disk 1", "continue_generation"]
            assert player.calls == ["continue_generation", *update], "the version travels with the weights"
            assert set(ask(engine).output_versions) == {1}
            player.before.append(restarts)
            response = ask(engine)
            assert (len(response.output_tokens), set(response.output_versions)) == (4, {1})
            assert (player.label, player.calls[-1]) == ("1", "update_weights_from_disk 1")
            assert engine.status().num_restarts == 1


def test_every_version_is_found_and_names_its_model():
    for version in ("0.5.2", "0.5.6.post2", "0.5.20"):
        player = Player(version)
        with connected(player) as engine:
            assert find_model([engine.url], "") == "/elsewhere"
            player.refused = {"/model_info": [500], "/get_model_info": [500]}
            with pytest.raises(HeadwaterError, match="no server answers"):
                find_model([engine.url], "")


def test_prompts_of_old_weights_are_not_reused_after_another_program_has_changed_them():
    player = Player("0.5.23")
    with serving(*player.routes()) as url:
        engine = SglangEngine.connect(url, replace(context(f"rollout.servers=[{url}]"), owns_weights=False))
        try:
            for player.label in ("6", "6", "7", "7"):
                ask(engine)
        finally:
            engine.close()
    first, six, before, seven = player.keys
    assert six == before, "only an answer tells that the weights are others"
    assert len({first, six, seven}) == 3


def test_updates_in_flight_need_exact_labels_from_the_start():
    player = Player("0.5.23")
    with serving(*player.routes()) as url, pytest.raises(ConfigError, match="with --disable-overlap-schedule"):
        SglangEngine.connect(url, context(f"rollout.servers=[{url}]", "engine.update_mode=in_flight"))


def test_tokens_are_streamed_and_memory_is_released():
    async def follow() -> list[tuple[int, ...]]:
        request = ModelRequest("one", (5, 6, 7), SamplingParams(4), rng_key=5)
        return [delta.tokens async for delta in engine.astream(request)]

    player = Player()
    with connected(player) as engine:
        assert asyncio.run(follow()) == [(20,), (21, 22, 23), ()]
        assert engine.capabilities.streaming
        engine.sleep(("kv_cache",))
        assert player.calls[-2:] == ["pause_generation abort", "release_memory_occupation"]
        thread = threading.Thread(target=ask, args=(engine,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "nothing is sent to a server that is asleep"
        engine.wake(("kv_cache",))
        thread.join(60)
        assert player.calls[-2:] == ["resume_memory_occupation", "continue_generation"]


def test_tokens_that_have_arrived_are_not_generated_again_after_a_broken_stream():
    for version, is_streamed in (("0.5.23", True), ("0.5.10", False)):  # the older one would repeat log-probs
        player = Player(version)
        player.streams_new_tokens = True
        with connected(player) as engine:
            player.breaks = 2
            response = ask(engine)
        if not is_streamed:
            assert (player.asked, player.breaks) == ([[5, 6, 7]], 2), "it was requested as a whole"
            assert response.output_tokens == (20, 21, 22, 23)
            continue
        assert player.asked == [[5, 6, 7], [5, 6, 7, 20], [5, 6, 7, 20, 20]], "each continues the one before"
        assert (response.output_tokens, response.output_logprobs) == ((20, 20, 20, 21), (-0.5,) * 4)
        assert (response.output_versions, response.stop_reason) == ((1,) * 4, "length")


def test_another_server_continues_the_response_of_one_that_dies():
    players = [Player("0.5.23"), Player("0.5.23")]

    def die(dying: Player) -> None:
        dying.refused = {"/model_info": [502] * 1000}
        dying.breaks = 1
        for player in players:
            player.before.clear()

    with serving(*players[0].routes()) as first, serving(*players[1].routes()) as second:
        for player in players:
            player.streams_new_tokens = True
        router = make_fleet(context(f"rollout.servers=[{first}, {second}]"))
        try:
            router.update_weights(WeightUpdate.of(1, model().named_parameters())).result(60)
            for player in players:  # whichever gets the request dies after its first token
                player.before.append(lambda player=player: die(player))
            response = ask(router)
        finally:
            router.close()
    dead, other = sorted(players, key=lambda player: not player.refused)
    assert (dead.asked, other.asked) == ([[5, 6, 7]], [[5, 6, 7, 20]])
    assert (response.output_tokens, response.output_logprobs) == ((20, 20, 21, 22), (-0.5,) * 4)


def test_a_request_whose_caller_leaves_has_ended_before_an_update():
    """SGLang cannot empty its cache while a request runs, although nothing reads it any more."""

    async def leave() -> None:
        async for _ in engine.astream(ModelRequest("one", (5, 6, 7), SamplingParams(4), rng_key=5)):
            return

    player = Player("0.5.23")
    player.streams_new_tokens = player.holds_streams = True
    with connected(player) as engine:
        asyncio.run(leave())
        engine.update_weights(WeightUpdate.of(2, model().named_parameters()), "drain").result(60)
        update = ["pause_generation in_place", "update_weights_from_disk 2", "continue_generation"]
        assert player.calls[-5:] == ["abort_request", "ends", *update]
        # A stop string, which only the run looks for.
        count = len(player.calls)
        stop = tokenizer().decode([20])
        sampling = SamplingParams(4, stop_strings=(stop,))
        response = asyncio.run(engine.agenerate(ModelRequest("two", (5, 6, 7), sampling, rng_key=5)))
        assert (response.output_tokens, response.stop_reason) == ((20,), "stop")
        until(lambda: player.calls[count:] == ["abort_request", "ends"])


def test_the_pause_of_an_update_does_not_count_the_time_in_which_a_server_drains(monkeypatch):
    now, player = [0.0], Player()
    takes = {"/pause_generation": 100.0, "/update_weights_from_disk": 7.0, "/continue_generation": 1.0}

    def answered(path: str) -> None:
        now[0] += takes.get(path, 0.0)

    monkeypatch.setattr(session_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    update = WeightUpdate.of(2, model().named_parameters())
    source = SimpleNamespace(export=lambda: update.buckets, shapes=lambda: update.shapes)
    player.on_call = answered
    with connected(player, "engine.update_mode=drain") as engine:
        assert engine.status().metrics == {"last_update_pause_s": 8.0}
        takes["/update_weights_from_disk"] = 5.0
        assert publish(source, engine, 2).metrics()["time/weights_pause_s"] == 6.0


def test_weights_travel_over_a_process_group():
    player, weights = Player(), dict(model(seed=3).named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    names = list(weights)
    with connected(player, "rollout.weight_transfer=collective") as engine:
        assert player.calls[2:5] == [
            "init_weights_update_group",
            "update_weights_from_distributed 1",
            "continue_generation",
        ]
        two = ([(name, weights[name]) for name in part] for part in (names[:3], names[3:]))
        engine.update_weights(WeightUpdate(2, shapes, two)).result(60)
        expected = ["pause_generation abort", "update_weights_from_distributed", "update_weights_from_distributed 2"]
        assert player.calls[5:8] == expected, "the group is used again, and only the last call completes the version"
        assert all(torch.equal(player.member.received[name], weights[name]) for name in names)
        assert set(ask(engine).output_versions) == {2}
        player.label, player.seed = "default", 43  # another process, which is in no group
        until_needed(engine)
        engine.update_weights(WeightUpdate(3, shapes, [list(weights.items())])).result(60)
        assert player.calls.count("init_weights_update_group") == 2
        assert set(ask(engine).output_versions) == {3}


def test_newer_versions_take_tensors_between_two_calls():
    player, weights = Player("0.5.21"), dict(model(seed=3).named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with connected(player, "rollout.weight_transfer=collective") as engine:
        update = ["begin_weight_update", "update_weights_from_distributed 1", "end_weight_update"]
        assert player.calls[3:6] == update
        player.refused["/begin_weight_update"] = [400]  # an update that broke has left it open
        engine.update_weights(WeightUpdate(2, shapes, [list(weights.items())])).result(60)
        again = ["end_weight_update", "begin_weight_update", "update_weights_from_distributed 2", "end_weight_update"]
        assert player.calls[8:12] == again
        assert all(torch.equal(player.member.received[name], tensor) for name, tensor in weights.items())


def test_a_server_whose_requests_are_kept_is_continued_before_it_ends_them():
    """While it is paused, SGLang does not end requests, and would wait for them."""
    player = Player()
    with connected(player) as engine:
        engine.pause()
        engine.update_weights(WeightUpdate.of(2, model().named_parameters()), "interrupt").result(60)
        kept = ["pause_generation in_place", "continue_generation", "pause_generation abort"]
        assert player.calls[-4:] == [*kept, "update_weights_from_disk 2"], "and it stays paused"


def test_requests_that_wait_at_a_paused_server_do_not_block_an_update(monkeypatch):
    """An update leaves a paused server paused, and so does a lost connection."""
    monkeypatch.setattr(session_module, "_HEALTH_EVERY_S", 0.02)
    monkeypatch.setattr(servers_module, "_RETRY_S", 0.01)

    def update(mode: str, version: int) -> None:
        engine.update_weights(WeightUpdate.of(version, model().named_parameters()), mode).result(60)

    def reconnect(mode: str, version: int) -> None:
        update(mode, version)
        num_calls = len(player.calls)
        player.refused["/model_info"] = [502]
        until(lambda: len(player.calls) > num_calls)
        assert player.calls[num_calls:] == ["pause_generation in_place"]

    for pausing, mode in ((update, "interrupt"), (update, "drain"), (reconnect, "interrupt")):
        player, answers = Player(), []
        with connected(player) as engine:
            engine.pause()
            pausing(mode, 2)
            thread = threading.Thread(target=lambda: answers.append(ask(engine)))  # noqa: B023
            thread.start()
            until(lambda: player.num_waiting > 0)  # noqa: B023
            update("drain", 3)
            thread.join(60)
            assert set(answers[0].output_versions) == {2}
            assert player.is_paused


def test_no_request_continues_with_weights_that_were_loaded_in_part():
    """SGLang labels its tokens as those of the old weights, because the new label comes with the last tensors."""
    player, answers = Player("0.5.19"), []
    player.labels_tokens = True
    with connected(player) as engine:
        player.holds = True
        thread = threading.Thread(target=lambda: answers.append(ask(engine)))
        thread.start()
        until(lambda: bool(player.held))
        player.refused["/update_weights_from_disk"] = [400]
        with pytest.raises(WeightsIncomplete):
            engine.update_weights(WeightUpdate.of(2, model().named_parameters()), "in_flight").result(60)
        assert player.calls[-2:] == ["pause_generation in_place", "continue_generation"]
        player.holds = False
        player.held.popitem()[1].set()  # its answer is not read any more
        assert not answers
        engine.update_weights(WeightUpdate.of(3, model().named_parameters()), "in_flight").result(60)
        thread.join(60)
        assert answers[0].output_versions == (3, 3, 3, 3)


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.005)


def until_needed(engine: SglangEngine) -> None:
    """The next request notices that the process is another one, and waits for weights."""

    async def waits() -> None:
        asked = asyncio.ensure_future(engine.agenerate(ModelRequest("two", (5,), SamplingParams(4), rng_key=5)))
        while not engine.status().needs_weights:
            assert not asked.done()
            await asyncio.sleep(0.02)
        asked.cancel()

    asyncio.run(asyncio.wait_for(waits(), 60))


def test_a_restart_whose_weights_cannot_be_loaded_yet_is_tried_again(monkeypatch):
    """A server that has lost its weights never answers as if it had them."""
    monkeypatch.setattr(session_module, "_HEALTH_EVERY_S", 3600.0)
    monkeypatch.setattr(servers_module, "_RETRY_S", 0.01)
    player = Player()

    def restarts() -> None:
        player.label, player.seed = "", 43  # versions that do not tell which weights they have
        player.refused = {"/generate": [502], "/model_info": [502], "/update_weights_from_disk": [503, 503]}

    with connected(player) as engine:
        player.before.append(restarts)
        response = ask(engine)
        assert (len(response.output_tokens), set(response.output_versions)) == (4, {1})
        assert player.label == "1"
        assert player.calls.count("update_weights_from_disk 1") == 2
        assert engine.status().num_restarts == 1


def test_a_server_that_is_full_is_asked_again_later(monkeypatch):
    monkeypatch.setattr(requests_module, "_FIRST_WAIT_S", 0.001)
    player = Player()
    with connected(player) as engine:
        player.refused["/generate"] = [503, 429] * 4
        assert len(ask(engine).output_tokens) == 4, "more often than a stream may break"
        monkeypatch.setattr(requests_module, "_REFUSED_LIMIT_S", -1.0)
        player.refused["/generate"] = [503]
        with pytest.raises(QueueFull, match="status 503"):
            ask(engine)


def test_an_aborted_request_returns_the_tokens_that_the_server_has(monkeypatch):
    monkeypatch.setattr(requests_module, "_ABORT_S", 60.0)
    player = Player()
    with connected(player) as engine:
        player.holds = True
        answers: list[ModelResponse] = []
        thread = threading.Thread(target=lambda: answers.append(ask(engine)))
        thread.start()
        while not player.held:
            time.sleep(0.01)
        assert engine.abort("one") == 1
        thread.join(60)
        assert (answers[0].stop_reason, answers[0].output_tokens) == ("abort", (20,))
        until(lambda: engine.status().num_running + engine.status().num_waiting == 0)  # just after the answer


def test_streams_of_all_servers_share_the_connections_of_the_process():
    """Each engine has its own event loop."""
    turns, together = StreamTurns(2), []

    async def hold(ends: asyncio.Event) -> None:
        async with turns.turn():
            together.append(2 - turns._num_free)
            await ends.wait()

    async def use(count: int) -> None:
        ends = asyncio.Event()
        held = [asyncio.create_task(hold(ends)) for _ in range(count)]
        await asyncio.sleep(0.05)
        held[-1].cancel()  # it holds a turn or waits for one
        ends.set()
        done = await asyncio.gather(*held, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in done] == [False] * (count - 1) + [True]

    threads = [threading.Thread(target=lambda: asyncio.run(use(20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(together) >= 3 * 19
    assert max(together) <= 2
    assert (turns._num_free, len(turns._waiting)) == (2, 0)


def test_the_error_of_a_server_that_refuses_a_group_is_not_hidden(monkeypatch):
    monkeypatch.setattr(group, "LIMIT_S", 0.5)
    player = Player()
    with serving(*player.routes()) as url:
        engine = SglangEngine.connect(url, context(f"rollout.servers=[{url}]", "rollout.weight_transfer=collective"))
        try:
            player.refused["/init_weights_update_group"] = [500]
            with pytest.raises(HeadwaterError, match="status 500"):
                engine.update_weights(WeightUpdate.of(1, model().named_parameters())).result(60)
        finally:
            engine.close()
