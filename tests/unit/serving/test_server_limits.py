"""What one client may ask of a server, and that others are answered meanwhile. A real server on a real port."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from engine.engine_parts import LIMIT_S, make_model, run, running
from patience import long_enough
from safetensors.torch import save_file
from serving.parts import limits, refusal
from tiny import tokenizer

from headwater.engine.engine import Engine
from headwater.serving.app import build_app, is_own_host
from headwater.serving.listen import bind, make_runner, url
from headwater.serving.options import ServerOptions
from headwater.serving.reading import BodyReader

NAME = "tiny"
BLOCKED_S = 0.3
"""Processor time of this process for one ``/health`` while the server works on something else. The garbage collection
of a process that has run a thousand other tests is part of it."""
BUSY_MACHINE_S = 10.0
"""The same if other programs use the machine."""


class Recorder:
    """A tokenizer that notes which threads use it, and for how many characters. It can be made to wait."""

    def __init__(self) -> None:
        self.inner = tokenizer()
        self.threads: list[str] = []
        self.num_characters = 0
        self.started = threading.Event()
        self.may_continue = threading.Event()
        self.may_continue.set()

    def encode(self, text: str, **options: Any) -> list[int]:
        self.started.set()
        assert self.may_continue.wait(LIMIT_S)
        self.threads.append(threading.current_thread().name)
        self.num_characters += len(text)
        return self.inner.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(num_pages=2048, page_tokens=4) as running_engine:
        yield running_engine


@asynccontextmanager
async def serving(
    engine: Engine, words: Any = None, **options: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession, socket.socket]]:
    """A server as ``headwater serve`` runs it, and a client."""
    chosen = ServerOptions(NAME, **options)
    runner = make_runner(build_app(engine, words or tokenizer(), chosen), chosen)
    await runner.setup()
    with bind("127.0.0.1", 0) as taken:
        await web.SockSite(runner, taken).start()
        try:
            async with aiohttp.ClientSession(url(taken), timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as client:
                yield url(taken), client, taken
        finally:
            await runner.cleanup()


async def post(client: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data, headers=headers) as reply:
        return reply.status, await reply.json()


async def check_health(client: aiohttp.ClientSession, until: asyncio.Future[Any], what: object = "") -> None:
    """``/health`` answers in time until ``until`` is done. Time in which other programs run does not count."""
    while True:
        began, used = time.monotonic(), time.process_time()
        async with client.get("/health") as reply:
            assert reply.status == 200
        assert time.process_time() - used < BLOCKED_S, what
        assert time.monotonic() - began < BUSY_MACHINE_S, what
        if until.done():
            return
        await asyncio.sleep(0.001)


async def once_of_three(check: Callable[[], Awaitable[None]]) -> None:
    """``check`` holds once in at most three attempts: a server that is blocked by its work is so every time."""
    for _ in range(2):
        with suppress(AssertionError):
            return await check()
    return await check()


USER = {"role": "user", "content": "hi"}
COSTLY = [
    ("/v1/completions", {"prompt": "hi", "n": 65_000}, "n: 65000 responses are more than one request may ask for"),
    ("/v1/chat/completions", {"messages": [USER], "n": 65_000}, "n: 65000 responses"),
    ("/generate", {"text": "hi", "sampling_params": {"n": 65_000}}, "sampling_params.n: 65000 responses"),
    ("/v1/completions", {"prompt": ["hi"] * 60_000}, "prompt: 60000 responses"),
    ("/generate", {"text": ["hi"] * 60_000}, "text: 60000 responses"),
    ("/v1/completions", {"prompt": ["hi"] * 4096, "n": 2}, "n: 8192 responses"),
    ("/v1/completions", {"prompt": "hi", **{f"key{place}": 1 for place in range(5000)}}, "has 5001 fields"),
    ("/generate", {"text": "hi", "sampling_params": dict.fromkeys(map(str, range(5000)), 1)}, "has 5000 fields"),
    ("/v1/completions", {"prompt": "hi", "k" * 2_000_000: 1}, "no such field"),
    ("/v1/completions", {"prompt": "hi", "model": "m" * 2_000_000}, "this server serves"),
    ("/v1/completions", {"prompt": "hi", "stop_token_ids": [5] * 5000}, "stop_token_ids: contains 5000"),
    ("/v1/completions", {"prompt": "hello " * 1_000_000}, "prompt: the prompt has 6000000 characters"),
    ("/v1/chat/completions", {"messages": [{**USER, "content": "x" * 2_000_000}]}, "messages: the prompt has"),
    ("/v1/chat/completions", {"messages": [USER] * 20_000}, "messages: the prompt has 20000 messages"),
    ("/generate", {"text": ["hi"] * 9, "rid": "r" * 1_000_000}, "has 1000000 characters, and the limit is 512"),
    ("/control/abort", {"request_id": "x", "k" * 30_000: 1}, "no such field"),
    ("/control/pause", {"k" * 2_000_000: 1}, "no such field"),
]


def test_costly_bodies_are_refused_while_others_are_answered(engine):
    async def check(client: aiohttp.ClientSession, path: str, body: Any, message: str) -> None:
        call = asyncio.ensure_future(post(client, path, json.dumps(body).encode()))
        try:
            await check_health(client, call, (path, message))
        finally:
            status, answer = await call
        assert status in (400, 404), (path, answer)
        assert message in answer["error"]["message"], path
        assert len(json.dumps(answer)) < 2500, path

    async def scenario() -> None:
        async with serving(engine) as (_, client, _):
            for each in COSTLY:
                await once_of_three(lambda each=each: check(client, *each))

    run(scenario())


def test_thousands_of_responses_do_not_block_others(engine):
    """They wait in a paused engine, and end when the client leaves."""

    async def scenario(stream: bool) -> None:
        async with serving(engine) as (_, client, _):
            await until(lambda: engine.metrics().num_waiting == 0)
            body = {"prompt": "hi", "n": 2000, "stream": stream}
            call = asyncio.ensure_future(post(client, "/v1/completions", body))
            started = asyncio.ensure_future(until(lambda: engine.metrics().num_waiting == 2000))
            await check_health(client, started)
            await started
            call.cancel()
            left = asyncio.ensure_future(until(lambda: engine.metrics().num_waiting == 0))
            await check_health(client, left)
            await left

    engine.pause()
    try:
        for stream in (False, True):
            run(once_of_three(lambda stream=stream: scenario(stream)))
    finally:
        engine.resume()


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110  the engine's counters cannot be awaited
            await asyncio.sleep(0.005)


def test_a_prompt_is_tokenised_in_a_thread_and_not_after_its_client_has_left(engine, monkeypatch):
    words, has_noticed, in_thread = Recorder(), threading.Event(), BodyReader.in_thread

    async def watched(reader: BodyReader, work: Any) -> Any:
        try:
            return await in_thread(reader, work)
        except asyncio.CancelledError:
            has_noticed.set()
            raise

    monkeypatch.setattr(BodyReader, "in_thread", watched)

    async def scenario() -> None:
        async with serving(engine, words) as (_, client, _):
            words.threads.clear()  # of the server's start
            for path, body in [
                ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
                ("/v1/chat/completions", {"messages": [USER], "max_tokens": 1}),
                ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 1}}),
            ]:
                status, answer = await post(client, path, body)
                assert status == 200, answer
            assert len(words.threads) == 3
            assert all(name.startswith("headwater-body") for name in words.threads), words.threads

            words.started.clear()
            words.may_continue.clear()
            call = asyncio.ensure_future(post(client, "/v1/completions", {"prompt": ["hi"] * 100}))
            await asyncio.to_thread(words.started.wait, LIMIT_S)
            async with client.get("/health") as reply:
                assert reply.status == 200
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(has_noticed.is_set)  # that the connection is closed
            words.may_continue.set()
            assert (await post(client, "/v1/completions", {"prompt": "hi", "max_tokens": 1}))[0] == 200

    run(scenario())
    assert 5 <= len(words.threads) < 50, "the other prompts of the client that has left were tokenised too"


def test_a_text_that_is_too_long_is_not_tokenised_as_a_whole():
    words = Recorder()
    short = limits(max_model_tokens=4096)
    ruled = type(short)(words, short.engine)
    assert "has 300000 characters" in str(refusal(ruled.tokens_of_text, "a" * 300_000, "prompt"))
    assert words.num_characters == 0
    # Few enough characters to be possible, too many tokens: refused after the first slices.
    assert "more than 4096 tokens" in str(refusal(ruled.tokens_of_text, "ab, " * 60_000, "prompt"))
    assert words.num_characters < 100_000
    # Many characters per token: such a text is read as before.
    longest = max((tokenizer().decode([token]) for token in range(6, 512)), key=len)
    text = longest * (40_000 // len(longest))
    tokens = tuple(tokenizer().encode(text))
    assert len(text) > 4 * len(tokens)
    fits = type(short)(words, limits(max_model_tokens=len(tokens)).engine)
    assert fits.tokens_of_text(text, "prompt") == tokens


# Files and versions


def test_only_regular_files_are_read_as_weights(engine, tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(pipe)
    indexed = tmp_path / "indexed"
    indexed.mkdir()
    (indexed / "model.safetensors.index.json").symlink_to("/dev/zero")

    async def scenario() -> None:
        async with serving(engine) as (_, client, _):
            for path, reason in [
                (str(pipe), "it is not a regular file"),
                (str(folder), "it is not a regular file"),
                (str(indexed), "it is not a regular file"),
                ("/dev/zero", "it is not a regular file"),
                (str(tmp_path / "none"), "No such file"),
                ("/" + "x" * 300, "File name too long"),
                ("/".join(["deep"] * 100_000), "File name too long"),
                ("a\0b", "null"),
                ("/proc/self/mem/x", "Not a directory"),
            ]:
                for call, body in [
                    ("/control/update_weights", {"version": 1, "source": {"file": path}}),
                    ("/update_weights_from_disk", {"model_path": path}),
                ]:
                    status, answer = await post(client, call, body)
                    message = answer["message"] if "message" in answer else answer["error"]["message"]
                    assert (status, reason in message) == (400, True), (path[:80], answer)
                    assert len(message) < 2000
            async with client.get("/health") as reply:
                assert reply.status == 200

    run(scenario())


def saved(folder: Path, seed: int) -> Path:
    file = folder / f"weights-{seed}.safetensors"
    save_file({name: each.detach() for name, each in make_model(seed=seed).named_parameters()}, file)
    return file


def test_updates_without_a_version_get_different_ones(engine, tmp_path):
    files = [saved(tmp_path, seed) for seed in range(4)]
    first = engine.get_version() + 1

    async def scenario() -> list[tuple[int, Any]]:
        async with serving(engine) as (_, client, _):
            calls = [post(client, "/update_weights_from_disk", {"model_path": str(file)}) for file in files]
            answers = await asyncio.gather(*calls)
            # One that fails does not keep the others from their turn.
            refused = await post(client, "/update_weights_from_disk", {"model_path": "no such file"})
            assert refused[0] == 400
            return [*answers, await post(client, "/update_weights_from_disk", {"model_path": str(files[0])})]

    answers = run(scenario())
    versions = sorted(int(answer["message"].rstrip(".").rpartition(" ")[2]) for _, answer in answers)
    assert versions == list(range(first, first + 5))
    assert engine.get_version() == first + 4


def test_a_drain_that_takes_too_long_is_named(engine, tmp_path):
    body = {"version": 9, "mode": "drain", "source": {"file": str(saved(tmp_path, 1))}, "limit_s": 1}

    async def scenario() -> tuple[int, Any]:
        async with serving(engine) as (_, client, _):
            while True:
                long = {"prompt": "hi", "max_tokens": 250, "ignore_eos": True, "n": 16}
                response = asyncio.ensure_future(post(client, "/v1/completions", long))
                await until(lambda asked=response: engine.metrics().num_running or asked.done())
                assert (await post(client, "/control/sleep", {"tags": ["kv_cache"]}))[0] == 200
                answer = await post(client, "/control/update_weights", body)
                assert (await post(client, "/control/wake", {"tags": ["kv_cache"]}))[0] == 200
                assert (await post(client, "/control/abort", {"all": True}))[0] == 200
                assert (await response)[0] == 200
                if answer[0] != 200:  # otherwise the response had ended before the engine slept
                    return answer

    status, answer = run(scenario())
    message = answer["error"]["message"]
    assert status == 504
    assert f"drain: the engine takes version 9 from {body['source']['file']}; the engine is asleep" in message
    assert "limit_s (in a training run rollout.timeout_s) allows more time" in message


# Connections


def test_a_web_page_whose_name_points_here_is_refused(engine):
    own = ["127.0.0.1", "localhost:8000", "LocalHost.", "app.localhost", "[::1]:8000", "10.0.0.7:80", "[fe80::1%eth0]"]
    for host in [*own, socket.gethostname(), "Node7:8000"]:
        assert is_own_host(host, ("node7.",)), host
    for host in ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com:8000", "evil-localhost", "::x", "[x"]:
        assert not is_own_host(host, ("node7", "0.0.0.0")), host
        assert is_own_host(host, ("*",)), host

    async def scenario() -> None:
        async with serving(engine, allowed_hosts=("node7",)) as (_, client, _):
            for host, status in [("evil.com", 403), ("node7:8000", 200), ("localhost", 200)]:
                async with client.get("/v1/models", headers={"Host": host}) as reply:
                    assert reply.status == status, host
                    if status == 403:
                        assert "--allowed-host" in (await reply.json())["error"]["message"]
            async with client.get("/health", headers={"Host": "evil.com"}) as reply:
                assert reply.status == 200
        async with serving(engine, api_key="key") as (_, client, _):
            headers = {"Host": "evil.com", "Authorization": "Bearer key"}
            async with client.get("/v1/models", headers=headers) as reply:
                assert reply.status == 200

    run(scenario())


def sent(taken: socket.socket, data: bytes) -> bytes:
    """Everything that the server sends after ``data``, until it closes the connection."""
    with closing(socket.create_connection(taken.getsockname(), timeout=LIMIT_S)) as client:
        client.sendall(data)
        received = b""
        while part := client.recv(65536):
            received += part
        return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"


def test_connections_that_send_no_whole_request_are_closed(engine):
    async def scenario(limit_s: float) -> list[bytes]:
        async with serving(engine, idle_limit_s=limit_s, body_limit_s=limit_s) as (_, _, taken):
            halves = [b"", b"GET /health HTT", HEAD, HEAD + b'\r\n{"prompt": ']
            return await asyncio.gather(*(asyncio.to_thread(sent, taken, half) for half in halves))

    def check(limit_s: float) -> None:
        *headers, body = run(scenario(limit_s))
        assert headers == [b"", b"", b""]
        assert body.startswith(b"HTTP/1.1 408 ")
        assert f"the body did not arrive within {limit_s:g} s".encode() in body

    long_enough(check, 0.2, 10.0)


def test_what_is_not_http_is_logged_as_one_line(engine, caplog):
    async def scenario() -> None:
        async with serving(engine) as (_, _, taken):
            for data in [
                b"GET /\x00 HTTP/1.1\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"nonsense\r\n\r\n",
                b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
                b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 20_000 + b"\r\n\r\n",
            ]:
                assert b" 400 " in await asyncio.to_thread(sent, taken, data), data[:50]

    with caplog.at_level(logging.INFO):
        run(scenario())
    lines = [record for record in caplog.records if "not valid HTTP" in record.getMessage()]
    assert len(lines) >= 3
    for record in caplog.records:
        if record.name == "asyncio":  # about what earlier tests have left
            continue
        assert record.exc_info is None, record
        assert "\n" not in record.getMessage()
        assert len(record.getMessage()) < 400


def test_a_body_that_cannot_be_decoded_is_an_error_of_the_client(engine, caplog):
    async def scenario() -> None:
        async with serving(engine, max_body_bytes=10_000) as (_, client, taken):
            close = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            for rest in [
                b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
                b"Content-Encoding: gzip\r\nContent-Length: 8\r\n\r\nnot gzip",
                b"Content-Encoding: deflate\r\nContent-Length: 8\r\n\r\nnot gzip",
            ]:
                answer = await asyncio.to_thread(sent, taken, close + rest)
                assert b" 400 Bad Request" in answer.splitlines()[0], (rest, answer)
            bomb = gzip.compress(b" " * 10_000_000)
            assert len(bomb) < 10_000
            status, answer = await post(client, "/v1/completions", bomb, **{"Content-Encoding": "gzip"})
            assert (status, answer["error"]["code"]) == (413, "body_too_large")

    run(scenario())
    assert not [each for each in caplog.records if each.exc_info is not None and each.name != "asyncio"]
