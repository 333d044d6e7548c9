"""``headwater serve`` as a real process, called by the official OpenAI client, by plain HTTP and by raw sockets."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import openai
import pytest
import tiny
import torch
from command import ROOT, headwater
from safetensors.torch import load_file, save_file

from headwater.config.schema import RewardConfig
from headwater.core.records import Answer as Reply
from headwater.core.records import Score
from headwater.models.load import load_model, load_tokenizer
from headwater.models.save import save_model
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager
from headwater.weights.shared_memory import SlotSender

KEY = "a key of this test"
MAX_QUEUE = 8
LONG = {"max_new_tokens": 1900, "ignore_eos": True}
"""Takes seconds, so that something can happen to it."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    body: Any


@dataclass
class Server:
    process: forked.Forked
    lines: list[str] = field(default_factory=list)
    url: str = ""
    key: str = ""
    reader: threading.Thread | None = None
    """Reads its lines."""

    def call(self, path: str, body: Any = None, **headers: str) -> Answer:
        """POST with a body, GET without."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if self.key:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return Answer(reply.status, reply.headers, _parsed(reply.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, _parsed(error.read()))

    def generate(self, **body: Any) -> Any:
        answer = self.call("/generate", body)
        assert answer.status == 200, answer.body
        return answer.body

    def metrics(self) -> dict[str, Any]:
        return self.call("/metrics.json").body

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(metrics := self.metrics()):
            assert time.monotonic() < deadline, f"{what}: {metrics}"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=300)
        if self.reader is not None:
            self.reader.join(300)  # its last lines may still be on their way
        return code


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


def start(*arguments: str, key: str = "", stdin: int | None = None) -> Server:
    process = forked.popen(
        "-m", "headwater", "serve", "tiny:qwen3", "--port", 0, *arguments,
        cwd=ROOT, env={**os.environ, "HEADWATER_API_KEY": key}, stdin=stdin, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    server = Server(process, key=key)
    ready: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            if line.startswith("serving "):
                ready.put(line.split()[-1])
        ready.put(None)

    server.reader = threading.Thread(target=read, daemon=True)
    server.reader.start()
    url = ready.get(timeout=600)
    assert url is not None, "".join(server.lines)
    server.url = url
    return server


def open_weight_update(server: Server, shapes: dict[str, list[int]]) -> None:
    """Begin an update whose sender then disappears. The engine waits for weights and generates nothing."""
    slots = SlotSender(shapes, torch.float32)
    memory = {"shared_memory": slots.name, "slot_bytes": slots.slot_bytes, "dtype": "float32"}
    try:
        assert server.call("/control/start_weight_update", {"version": 1, "shapes": shapes, **memory}).status == 200
    finally:
        slots.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = start(f"engine.max_queue={MAX_QUEUE}", "engine.kv_cache_gib=0.05", "--max-body-mib", "0.25", key=KEY)
    yield started
    # Before the request: on a busy machine, it could end while the model is loaded.
    model = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(started.generate, text="abc", sampling_params=LONG)
        started.wait_for(lambda m: m["num_running"] == 1, "not started")
        open_weight_update(started, shapes)
        assert started.stop() == 0, "".join(started.lines)
        assert reply.result(timeout=300)["meta_info"]["finish_reason"]["type"] == "abort"
    assert "Traceback" not in "".join(started.lines)


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames or "client" in request.fixturenames:
        running = request.getfixturevalue("server")
        running.wait_for(
            lambda m: m["num_running"] + m["num_waiting"] + m["kv_pages_used"] == 0 and not m["is_paused"],
            "something is left over",
        )


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny:qwen3")


def test_it_judges_responses(server, monkeypatch):
    """The scorer ``llm_judge`` with a served model as the judge. A schema makes it answer with a score."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    properties = {"score": {"type": "integer", "minimum": 0, "maximum": 10}}
    schema = {"type": "object", "properties": properties, "required": ["score"], "additionalProperties": False}
    guided = {"response_format": {"type": "json_schema", "json_schema": {"name": "score", "schema": schema}}}
    common = {
        "base_url": f"{server.url}/v1", "model": "tiny:qwen3", "api_key_env": "JUDGE_KEY", "prompt": "{response}",
        "max_tokens": 200, "price_out": 1e6,
    }  # fmt: skip

    async def judge(manager: NaiveRewardManager) -> list[Any]:
        answers = [Reply(tiny.prompt(uid=f"row{number}"), f"{number}+1") for number in range(2)]
        return await asyncio.gather(*(manager.score(each) for each in answers), return_exceptions=True)

    config = RewardConfig(function="llm_judge", function_args={**common, "score_key": "score", "extra_body": guided})
    with closing(NaiveRewardManager(config, Spans())) as manager:
        scores = asyncio.run(judge(manager))
    assert {type(score) for score in scores} == {Score}, scores
    assert all(0 <= score.value <= 1 and score.info["judge_prompt_tokens"] > 0 for score in scores)
    assert all(score.info["judge_cost"] == score.info["judge_completion_tokens"] > 0 for score in scores)

    with closing(NaiveRewardManager(RewardConfig(function="llm_judge", function_args=common), Spans())) as manager:
        failures = asyncio.run(judge(manager))
        counts = manager.take_counts()
    assert {each.cause for each in failures} == {"judge_nonsense"}, "an untrained model writes no score"
    assert counts["reward/spent_on_failures/judge_cost"] > 0


# The OpenAI API


def test_it_tells_where_it_serves(server):
    assert re.fullmatch(r"loading tiny:qwen3 in (float32 on cpu|\w+ on cuda:\d+)\n", server.lines[0]), server.lines
    assert server.lines[1].startswith("serving tiny:qwen3 at http://127.0.0.1:")
    assert server.call("/health").status == 200
    assert server.call("/health_generate").status == 200


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny:qwen3"]
    assert client.models.retrieve("tiny:qwen3").id == "tiny:qwen3"


def test_a_completion(client, tokenizer):
    reply = client.completions.create(
        model="tiny:qwen3", prompt="12+30=", max_tokens=12, seed=1, logprobs=1, extra_body={"return_token_ids": True}
    )
    (choice,) = reply.choices
    tokens = choice.model_extra["token_ids"]
    assert choice.model_extra["prompt_token_ids"] == tokenizer.encode("12+30=")
    assert choice.finish_reason in ("stop", "length")
    assert choice.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(choice.logprobs.token_logprobs) == len(tokens) == reply.usage.completion_tokens
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
    assert reply.usage.prompt_tokens == len(tokenizer.encode("12+30="))


def test_a_stream_says_what_the_whole_reply_says(client):
    asked = {"model": "tiny:qwen3", "prompt": "abc", "max_tokens": 40, "seed": 3, "logprobs": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [x for choice in choices for x in choice.logprobs.token_logprobs] == pytest.approx(
        whole.choices[0].logprobs.token_logprobs, abs=1e-4
    )
    assert [x for choice in choices for x in choice.logprobs.text_offset] == whole.choices[0].logprobs.text_offset
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_samples_are_reproducible_and_differ(client):
    asked = {"model": "tiny:qwen3", "prompt": ["ab", "cd"], "max_tokens": 12, "seed": 5}
    three, again = (client.completions.create(**asked, n=3) for _ in range(2))
    texts = [choice.text for choice in three.choices]
    assert [choice.text for choice in again.choices] == texts
    assert [choice.index for choice in three.choices] == list(range(6))
    assert len(set(texts)) > 1
    assert [choice.text for choice in client.completions.create(**asked, n=1).choices] == [texts[0], texts[3]]
    unseeded = [client.completions.create(model="tiny:qwen3", prompt="ab", max_tokens=12).choices[0].text for _ in "12"]
    assert unseeded[0] != unseeded[1]


def test_a_stop_text_ends_the_reply_and_is_not_in_it(client, tokenizer):
    asked = {"model": "tiny:qwen3", "prompt": "abc", "max_tokens": 60, "seed": 3}
    free = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    middle = next(place for place in range(20, len(free) - 2) if "\ufffd" not in free[place : place + 2])
    stop = free[middle : middle + 2]
    extra = {"ignore_eos": True, "return_token_ids": True}
    choice = client.completions.create(**asked, stop=[stop], extra_body=extra).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == free[: free.index(stop)]
    assert stop in tokenizer.decode(choice.model_extra["token_ids"], skip_special_tokens=True)
    streamed = client.completions.create(**asked, stop=[stop], stream=True, extra_body=extra)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_a_chat(client, tokenizer):
    messages = [{"role": "user", "content": "What is 7 + 5?"}]
    asked = {"model": "tiny:qwen3", "messages": messages, "max_completion_tokens": 16, "seed": 2, "n": 2}
    whole = client.chat.completions.create(**asked, logprobs=True, extra_body={"return_token_ids": True})
    prompt = tokenizer.encode("<|user|>What is 7 + 5?<|end|><|assistant|>", add_special_tokens=False)
    assert whole.model_extra["prompt_token_ids"] == prompt
    for choice in whole.choices:
        assert len(choice.logprobs.content) == len(choice.model_extra["token_ids"])
        assert choice.message.role == "assistant"
    texts = ["", ""]
    roles = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        assert chunk.system_fingerprint == whole.system_fingerprint
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]


def test_the_asynchronous_client_and_many_requests_at_once(server):
    async def ask() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            asked = {"model": "tiny:qwen3", "prompt": "abc", "max_tokens": 12, "seed": 9}
            replies = await asyncio.gather(*(client.completions.create(**asked) for _ in range(MAX_QUEUE)))
            text = ""
            async for chunk in await client.completions.create(**asked, stream=True):
                text += chunk.choices[0].text
            return [reply.choices[0].text for reply in replies], text

    texts, streamed = asyncio.run(ask())
    assert set(texts) == {streamed}


def test_a_tool_call(client):
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    reply = client.chat.completions.create(
        model="tiny:qwen3",
        messages=[{"role": "user", "content": "What time is it?"}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    )
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})
    assert reply.choices[0].finish_reason == "tool_calls"


def test_refusals_reach_the_client(client):
    asked = {"model": "tiny:qwen3", "prompt": "abc"}
    with pytest.raises(openai.BadRequestError, match=r"max_tokens = 5000: the prompt has .* use at most") as caught:
        client.completions.create(**asked, max_tokens=5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError, match="did you mean min_tokens"):
        client.completions.create(**asked, extra_body={"min_token": 1})
    with pytest.raises(openai.BadRequestError, match=r"suffix.*not supported"):
        client.completions.create(**asked, suffix="d")
    with pytest.raises(openai.NotFoundError, match="this server serves 'tiny:qwen3'"):
        client.completions.create(model="gpt-17", prompt="abc")


# The SGLang API


def test_generate(server, tokenizer):
    asked = {"sampling_params": {"max_new_tokens": 8, "sampling_seed": 4}, "return_logprob": True}
    by_text = server.generate(text="abc", **asked)
    by_ids = server.generate(input_ids=tokenizer.encode("abc"), rid="mine", **asked)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_ids["meta_info"]["id"] == "mine"
    assert by_text["meta_info"]["weight_version"] == "0"
    logprobs = by_text["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in logprobs] == by_text["output_ids"]
    assert len(by_text["meta_info"]["output_versions"]) == by_text["meta_info"]["completion_tokens"]


def test_generate_in_a_batch_and_in_a_stream(server):
    asked = {"text": ["abc", "xyz"], "sampling_params": {"max_new_tokens": 20, "sampling_seed": 4, "n": 2}}
    whole = server.generate(**asked)
    assert len(whole) == 4
    events = server.call("/generate", {**asked, "stream": True}).body.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    seen: dict[int, dict[str, Any]] = {}
    for event in events[:-2]:
        body = json.loads(event.removeprefix("data: "))
        before = seen.get(body["index"], {"text": "", "output_ids": []})
        assert body["text"].startswith(before["text"])
        assert body["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        seen[body["index"]] = body
    assert [seen[place]["text"] for place in range(4)] == [each["text"] for each in whole]
    assert [seen[place]["output_ids"] for place in range(4)] == [each["output_ids"] for each in whole]


def test_a_request_is_aborted_by_its_rid(server):
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.generate, text="abc", rid="mine", sampling_params=LONG)
        server.wait_for(lambda m: m["num_running"] == 1, "not started")
        twice = server.call("/generate", {"text": "abc", "rid": "mine"})
        assert server.call("/abort_request", {"rid": "other"}).status == 200
        assert not reply.done()
        assert server.call("/abort_request", {"rid": "mine"}).status == 200
        body = reply.result(timeout=300)
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(body["output_ids"]) < 1900
    assert twice.status == 400
    assert "a request with this name is running" in twice.body["error"]["message"]


def test_pausing_as_sglang_does_aborts(server):
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.generate, text="abc", sampling_params=LONG)
        server.wait_for(lambda m: m["num_running"] == 1, "not started")
        assert server.call("/pause_generation", {}).body["status"] == "ok"
        assert reply.result(timeout=300)["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.call("/health_generate").status == 503
        late = pool.submit(server.generate, text="abc", sampling_params={"max_new_tokens": 2})
        time.sleep(0.2)
        assert not late.done()
        assert server.call("/continue_generation", {}).body["status"] == "ok"
        assert late.result(timeout=300)["meta_info"]["completion_tokens"] in (1, 2)


def test_information(server):
    assert server.call("/get_model_info").body["model_path"] == "tiny:qwen3"
    info = server.call("/get_server_info").body
    assert (info["max_queue"], info["context_length"]) == (MAX_QUEUE, 2048)
    assert info["internal_states"][0]["kv_pages_total"] > 0
    assert info["kv_cache_gib"] == 0.05
    assert (info["max_sequences"], info["page_tokens"], info["max_prefill_tokens"]) == (256, 16, 1024)


# Control


def test_pause_and_resume_keep_requests(server):
    with ThreadPoolExecutor(1) as pool:
        assert server.call("/control/pause", b"").body == {"is_paused": True}
        reply = pool.submit(server.generate, text="abc", sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        server.wait_for(lambda m: m["num_waiting"] == 1, "not waiting")
        time.sleep(0.2)
        assert not reply.done()
        assert server.call("/control/resume", b"").body == {"is_paused": False}
        assert reply.result(timeout=300)["meta_info"]["completion_tokens"] == 4


def greedy(server: Server) -> dict[str, Any]:
    return server.generate(text="12+30=", sampling_params={"max_new_tokens": 12, "temperature": 0, "ignore_eos": True})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Folders of the served model and of one with other weights."""
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"model-{seed}")
        model = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=seed)
        save_model(model, load_tokenizer("tiny:qwen3"), folder)
        folders.append(folder)
    return folders


def test_weights_change_and_replies_say_so(server, models, tmp_path):
    old = greedy(server)
    first = models[1] / "model.safetensors"
    answer = server.call("/control/update_weights", {"version": 7, "mode": "drain", "source": {"file": str(first)}})
    assert (answer.status, answer.body["version"]) == (200, 7)
    new = greedy(server)
    assert new["output_ids"] != old["output_ids"]
    assert new["meta_info"]["output_versions"] == [7] * 12
    assert new["meta_info"]["weight_version"] == "7"

    # One tensor of a wrong shape, one too few: refused whole, and the weights in use stay.
    tensors = load_file(first)
    name = next(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    for broken in (
        {**tensors, name: tensors[name][:-1].clone()},
        {key: tensors[key] for key in tensors if key != name},
    ):
        save_file(broken, tmp_path / "broken.safetensors")
        source = {"file": str(tmp_path / "broken.safetensors")}
        refused = server.call("/control/update_weights", {"version": 8, "source": source})
        assert refused.status == 400
        assert name in refused.body["error"]["message"]
        by_sglang = server.call("/update_weights_from_disk", {"model_path": source["file"]})
        assert (by_sglang.status, by_sglang.body["success"]) == (400, False)
    assert server.call("/control/version").body == {"version": 7}
    assert greedy(server)["output_ids"] == new["output_ids"]

    # From a folder, as SGLang's clients ask for it: what was there at first is back, under the next number.
    answer = server.call("/update_weights_from_disk", {"model_path": str(models[0])})
    assert answer.body["success"], answer.body
    back = greedy(server)
    assert (back["output_ids"], back["meta_info"]["weight_version"]) == (old["output_ids"], "8")
    assert server.call("/control/version", {"version": 0}).body == {"version": 0}


def test_weights_streamed_through_shared_memory(server, models):
    old = greedy(server)
    for folder in (models[1], models[0]):
        tensors = load_file(folder / "model.safetensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        slots = SlotSender(shapes, torch.float32)
        memory = {"shared_memory": slots.name, "slot_bytes": slots.slot_bytes, "dtype": "float32"}
        start = {"version": 0, "shapes": {name: list(shape) for name, shape in shapes.items()}, **memory}
        wrong = {**start, "shapes": {**start["shapes"], "extra": [1]}}
        try:
            refused = server.call("/control/start_weight_update", wrong)
            assert (refused.status, "unknown extra" in refused.body["error"]["message"]) == (400, True)
            assert server.call("/control/start_weight_update", start).status == 200
            for slot, entries in slots.fill([list(tensors.items())], lambda slot: None):
                answer = server.call("/control/update_weight_slot", {"slot": slot, "tensors": entries})
                assert answer.status == 200, answer.body
            answer = server.call("/control/finish_weight_update", {})
            assert (answer.status, answer.body["needs_weights"]) == (200, False)
        finally:
            slots.close()
        assert (greedy(server)["output_ids"] == old["output_ids"]) == (folder == models[0])
    missing = {**start, "shared_memory": "no-such-memory"}
    assert server.call("/control/start_weight_update", missing).status == 400
    again = server.call("/control/finish_weight_update", {})
    assert again.status == 400


def test_sleeping_keeps_requests(server):
    old = greedy(server)
    assert server.call("/control/sleep", {"tags": ["kv_cache", "weights"]}).status == 200
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(greedy, server)
        time.sleep(0.2)
        assert not reply.done()
        assert server.call("/control/wake", b"").status == 200
        assert reply.result(timeout=300)["output_ids"] == old["output_ids"]
    assert server.call("/release_memory_occupation", {}).status == 200
    assert server.call("/resume_memory_occupation", {"tags": ["kv_cache"]}).status == 200
    assert server.call("/resume_memory_occupation", {"tags": ["weights"]}).status == 200
    assert greedy(server)["output_ids"] == old["output_ids"]


def test_metrics(server):
    text = server.call("/metrics").body
    assert "# TYPE headwater_num_finished counter" in text
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(numbers["headwater_num_tokens_generated"]) > 0
    assert numbers["headwater_num_running"] == "0"


# Limits


def test_a_full_queue_is_told_with_a_time_to_come_back(server):
    server.call("/control/pause", b"")
    with ThreadPoolExecutor(MAX_QUEUE) as pool:
        replies = [pool.submit(server.generate, text="abc") for _ in range(MAX_QUEUE)]
        server.wait_for(lambda m: m["num_waiting"] == MAX_QUEUE, "queue not full")
        for body in ({"prompt": "abc"}, {"prompt": "abc", "stream": True}, {"prompt": "abc", "n": 2, "stream": True}):
            answer = server.call("/v1/completions", body)
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.body["error"]["code"] == "queue_full"
        assert server.call("/control/abort", {"all": True}).body == {"num_aborted": MAX_QUEUE}
        for reply in replies:
            assert reply.result(timeout=300)["meta_info"]["finish_reason"]["type"] == "abort"
    server.call("/control/resume", b"")


REFUSED = [
    ("/v1/completions", b'{"prompt": ', 400, "not valid JSON"),
    ("/v1/completions", b"[]", 400, "send an object"),
    ("/v1/completions", {"prompt": "x" * 300_000}, 413, "--max-body-mib"),
    ("/v1/completions", {"prompt": "x" * 200_000}, 400, "shorten the prompt"),
    ("/v1/completions", None, 405, "use POST"),
    ("/v1/completion", {}, 404, "did you mean /v1/completions?"),
    ("/nothing", None, 404, "known paths"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3000}}, 400, "max_new_tokens = 3000"),
    ("/control/update_weights", {"version": 1, "source": {"file": "no/such/file"}}, 400, "no/such/file"),
    ("/control/pause", {"now": 1}, 400, "now: no such field"),
]


def test_refusals_are_json_with_a_status(server):
    for path, body, status, part in REFUSED:
        answer = server.call(path, body)
        assert answer.status == status, path
        assert part in answer.body["error"]["message"], path


def test_a_body_whose_length_is_not_told_is_limited_too(server):
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"x" * 10_000

    request = urllib.request.Request(
        f"{server.url}/v1/completions", chunks(), {"Authorization": f"Bearer {KEY}"}, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=300)
    assert caught.value.code == 413


def test_only_who_has_the_key_is_let_in(server):
    for header in ("", "Bearer wrong", KEY, f"Bearer {KEY} ", "Bearer \xfc"):
        answer = server.call("/v1/models", Authorization=header)
        assert answer.status == (200 if header == f"Bearer {KEY} " else 401), header
    assert server.call("/metrics", Authorization="").status == 401
    assert server.call("/control/pause", b"", Authorization="").status == 401
    assert server.call("/health", Authorization="").status == 200


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose reply is not read yet."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    key = f"Authorization: Bearer {server.key}\r\n" if server.key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{key}Content-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def ends(metrics: dict[str, Any]) -> int:
    return metrics["num_finished"] + metrics["num_aborted"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_everything(server, stream):
    num_samples = 3
    body = {"prompt": "abc", "max_tokens": 1900, "ignore_eos": True, "n": num_samples, "stream": stream}
    for _ in range(5):
        before = server.metrics()
        num_ends = ends(before) + num_samples
        connection = send(server, "/v1/completions", body)
        server.wait_for(lambda m: m["num_running"] == num_samples and m["kv_pages_used"] > 0, "not started")
        if stream:
            assert b"200 OK" in connection.recv(1000)
        connection.close()
        server.wait_for(lambda m, num_ends=num_ends: ends(m) == num_ends, "still there")
        server.wait_for(lambda m: m["num_running"] + m["num_waiting"] + m["kv_pages_used"] == 0, "still held")
        after = server.metrics()
        # On a busy machine, the responses may end before the client leaves.
        if after["num_tokens_generated"] - before["num_tokens_generated"] < 1900 * num_samples:
            break
    assert after["num_aborted"] - before["num_aborted"] == num_samples


def test_a_client_that_leaves_while_it_waits_is_forgotten(server):
    server.call("/control/pause", b"")
    connections = [send(server, "/generate", {"text": "abc", "stream": stream}) for stream in (True, False)]
    server.wait_for(lambda m: m["num_waiting"] == 2, "not waiting")
    for connection in connections:
        connection.close()
    server.wait_for(lambda m: m["num_waiting"] == 0, "still there")
    server.call("/control/resume", b"")


# The command


@pytest.mark.slow
def test_the_hf_backend_serves_and_ctrl_c_stops_it():
    server = start("--backend", "hf", "--served-name", "mine")
    try:
        assert server.lines[0].startswith("loading tiny:qwen3 in ")
        assert server.lines[1].startswith("serving mine at ")
        assert server.call("/v1/models", Origin="http://example.com").status == 403
        taken = headwater("serve", "tiny:qwen3", "--port", server.url.rpartition(":")[2])
        assert taken.code == 2
        assert "is in use; use another port, or 0" in taken.stderr
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        asked = {"model": "mine", "prompt": "12+30=", "max_tokens": 6, "seed": 1}
        whole = client.completions.create(**asked)
        (chunk,) = client.completions.create(**asked, stream=True)
        assert chunk.choices[0].text == whole.choices[0].text
        messages = [{"role": "user", "content": "Hello"}]
        assert client.chat.completions.create(model="mine", messages=messages, max_tokens=4).usage.completion_tokens
        assert server.generate(text="abc", sampling_params={"max_new_tokens": 4})["output_ids"]
        info = server.call("/get_server_info").body
        assert (info["model_path"], info["capabilities"]["streaming"]) == ("tiny:qwen3", False)
        assert (
            server.call("/control/update_weights", {"version": 1, "mode": "in_flight", "source": {"file": "x"}}).status
            == 501
        )
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(server.generate, text="abc", sampling_params=LONG)
            server.wait_for(lambda m: m["num_running"] == 1, "not started")
            assert server.stop(signal.SIGINT) == 0, "".join(server.lines)
            assert reply.result(timeout=300)["meta_info"]["finish_reason"]["type"] == "abort"
    finally:
        server.stop()
    assert "Traceback" not in "".join(server.lines)


def test_the_server_of_a_run_ends_when_nobody_holds_its_input():
    """Which is what the operating system leaves of a run that was killed."""
    server = start("--until-eof", stdin=subprocess.PIPE)
    try:
        assert server.call("/health").status == 200
        assert server.process.poll() is None
        server.process.stdin.close()
        assert server.process.wait(timeout=300) == 0, "".join(server.lines)
    finally:
        server.stop()


def test_bad_arguments_are_told():
    for arguments, part in (
        (["tiny:qwen3", "engine.max_queu=5"], "engine.max_queu (command line): no such key; did you mean"),
        (["tiny:qwen3", "engine.max_queue=0"], "engine.max_queue = 0 (command line): must be >= 1"),
        (["tiny:qwen3", "--port", "99999"], "--port = 99999: must be in 0 to 65535"),
        (["tiny:qwen3", "--host", "no.such.host.invalid"], "--host = no.such.host.invalid: no such address"),
        (["tiny:qwen3", "--max-body-mib", "0"], "--max-body-mib = 0.0: must be > 0"),
        (["tiny:qwen3", "--host", "0.0.0.0", "--port", "0", "--backend", "hff"], "without an API key"),
        (["tiny:gpt", "--port", "0"], "unknown preset 'gpt'"),
        (["tiny:qwen3", "--port", "0", "--backend", "hff"], "did you mean 'hf'?"),
        (["tiny:qwen3", "--port", "0", "--tool-parser", "hermez"], "--tool-parser = hermez: unknown tool-call parser"),
        (["tiny:qwen3", "--port", "0", "--backend", "headwater.core.records:Score"], "it has no method load"),
    ):
        result = headwater("serve", *arguments)
        assert result.code == 2, arguments
        assert part in result.stderr, arguments
        assert "Traceback" not in result.stderr, arguments


EXACT = {"request_id": "exact", "input_tokens": [40, 41, 42], "sampling": {"max_new_tokens": 24}, "rng_key": 7}


def _exact_lines(server: Server, **fields: Any) -> list[dict[str, Any]]:
    answer = server.call("/headwater/generate", {**EXACT, **fields})
    assert answer.status == 200, answer.body
    assert answer.headers["Content-Type"].startswith("application/x-ndjson")
    # A single line was parsed already.
    text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
    return [json.loads(line) for line in text.splitlines()]


def test_an_exact_request_is_answered_line_by_line_and_goes_on_from_given_tokens(server):
    def joined(lines: list[dict[str, Any]], key: str) -> list[Any]:
        return [item for line in lines for item in line[key]]

    lines = _exact_lines(server)
    assert [line.get("stop_reason") for line in lines] == [None] * (len(lines) - 1) + ["length"]
    tokens, logprobs, versions = (joined(lines, key) for key in ("tokens", "logprobs", "versions"))
    assert (len(tokens), len(logprobs), versions) == (24, 24, [versions[0]] * 24)
    # Single precision, and not one bit less.
    assert [struct.unpack("f", struct.pack("f", value))[0] for value in logprobs] == logprobs
    later = _exact_lines(server, given_tokens=tokens[:20])
    assert joined(later, "tokens") == tokens[20:]
    assert joined(later, "logprobs") == pytest.approx(logprobs[20:], abs=1e-4)


def test_an_exact_request_that_is_wrong_gets_its_status(server):
    for change, message in (
        ({"given_tokens": [9999]}, "given_tokens[0] = 9999: no such token"),
        ({"sampling": {"max_new_tokens": 9999}}, "sampling.max_new_tokens = 9999: the prompt has"),
        ({"temperature": 1}, "temperature: no such field"),
    ):
        answer = server.call("/headwater/generate", {**EXACT, **change})
        assert answer.status == 400, change
        assert message in answer.body["error"]["message"], change


def test_an_exact_request_ends_with_its_client(server):
    body = json.dumps({**EXACT, "sampling": {"max_new_tokens": 1900, "ignore_end": True}}).encode()
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = urllib.request.urlopen(urllib.request.Request(f"{server.url}/headwater/generate", body, headers))
    assert reply.readline()
    assert server.call("/headwater/generate", EXACT).status == 400  # its name is taken
    reply.close()
    server.wait_for(lambda metrics: metrics["num_running"] == 0, "the client has gone and its request runs on")
    assert len(_exact_lines(server)) > 0


def test_the_checksum_of_the_weights_that_serve(server):
    answer = server.call("/control/checksum").body
    assert answer["checksum"].startswith("float32-")
    assert answer["version"] == server.call("/control/version").body["version"]
