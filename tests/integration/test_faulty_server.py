"""Runs over a server that answers garbage, or stops answering, in the middle of a run: what they say, and their ledger.

The server is a real one. What is between it and the run changes its answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from books import check_books
from command import CUT_DOWN, after_step, headwater, metrics, train_here
from player import serving
from running import Running

from headwater.backends.remote import session as session_module
from headwater.backends.sglang import http as sglang_module
from headwater.observe.run_directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faulty server")]

NUM_STEPS = 3
Answer = Callable[[web.Request, bytes], Awaitable[web.Response]]
"""Makes the answer to a call of the one that the server gave."""


class Between:
    """Passes calls on to a server, and may change the answers."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self.url = ""
        self.faults: list[Answer] = []
        """Each spoils one response. After the last one, the server works again."""
        self.is_silent = False

    async def __call__(self, request: web.Request) -> web.Response:
        if self.is_silent:
            await asyncio.Event().wait()
        url, body = f"{self._server.url}{request.path_qs}", await request.read()
        headers = {name: value for name, value in request.headers.items() if name in ("Content-Type", "Authorization")}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url, data=body, headers=headers) as reply,
        ):
            answer = await reply.read()
            if request.path == "/generate" and self.faults:
                return await self.faults.pop()(request, answer)
            return web.Response(status=reply.status, body=answer, content_type=reply.content_type)


async def not_json(request: web.Request, answer: bytes) -> web.Response:
    return web.Response(body=b"<html>Welcome!</html>")


async def no_logprobs(request: web.Request, answer: bytes) -> web.Response:
    told = json.loads(answer)
    told["meta_info"]["output_token_logprobs"] = [["many", None]]
    return web.json_response(told)


async def unknown_token(request: web.Request, answer: bytes) -> web.Response:
    told = json.loads(answer)
    told["meta_info"]["output_token_logprobs"][0][1] = 10**9
    return web.json_response(told)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    server = Running().start()
    try:
        yield server.ready()
    finally:
        server.kill()


@pytest.fixture
def between(server: Running) -> Iterator[Between]:
    between = Between(server)
    with serving(web.route("*", "/{path:.*}", between)) as url:
        between.url = url
        yield between


def settings(root: Path, between: Between) -> list[str]:
    return [
        "quickstart", *CUT_DOWN, f"trainer.total_steps={NUM_STEPS}", "trainer.checkpoint_every_steps=1",
        "eval.before=false", "eval.after=false", "rollout.backend=sglang", "rollout.weight_transfer=file",
        f"rollout.servers=[{between.url}]", f"run.root={root}",
    ]  # fmt: skip


def assert_ended_by(told: str, words: str, run: Path) -> None:
    """The run has failed for this reason, knows where every prompt is, and continues when the server works again."""
    assert words in told, told
    counts = json.loads((run / "status.json").read_text())["ledger"]
    assert counts["dispatched"] == sum(counts[name] for name in ("trained", "dropped", "buffered", "in_flight"))
    assert RunDirectory.open(run).read_ledger()[-1]["step"] < NUM_STEPS
    train_here("--resume", run)
    check_books(run, NUM_STEPS)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (not_json, "engine_failed", "the answer cannot be used: JSONDecodeError"),
        (no_logprobs, "engine_failed", "the answer cannot be used: ValueError"),
        (unknown_token, "invalid", "token 1000000000 is not in the vocabulary"),
    ],
)
def test_garbage_costs_its_groups_or_ends_the_run(tmp_path, between, fault, kind, words):
    def spoil() -> None:
        between.faults = [fault]

    run = tmp_path / "quickstart"
    with after_step(1, spoil):
        train_here(*settings(tmp_path, between), "rollout.on_failure=drop")
    check_books(run, NUM_STEPS)
    (dropped,) = [each for record in RunDirectory.open(run).read_ledger() for each in record["dropped"]]
    assert dropped["kind"] == kind
    assert words in dropped["message"]
    assert sum(each[f"groups/dropped_{kind}"] for each in metrics(run, "train")) == 1
    with after_step(1, spoil):
        stopped = headwater("train", *settings(tmp_path / "stopped", between))
    assert stopped.code != 0
    assert_ended_by(stopped.stderr, words, tmp_path / "stopped" / "quickstart")


def test_a_server_that_is_silent_ends_the_run_within_its_limit(tmp_path, between, monkeypatch):
    monkeypatch.setattr(session_module, "_HEALTH_EVERY_S", 0.5)
    monkeypatch.setattr(sglang_module, "_ALIVE_LIMIT_S", 5.0)

    def fall_silent() -> None:
        between.is_silent = True

    with after_step(1, fall_silent):
        stopped = headwater("train", *settings(tmp_path, between), "rollout.server_timeout_s=5")
    assert stopped.code != 0
    between.is_silent = False
    told = f"the SGLang server at {between.url} cannot be reached, after 5 s"
    assert_ended_by(stopped.stderr, told, tmp_path / "quickstart")


def test_a_server_of_an_unknown_version_is_refused_before_anything_is_written(tmp_path, server):
    class Old(Between):
        async def __call__(self, request: web.Request) -> web.Response:
            if request.path == "/server_info":
                return web.json_response({"version": "0.4.1"})
            return await super().__call__(request)

    old = Old(server)
    with serving(web.route("*", "/{path:.*}", old)) as old.url:
        refused = headwater("train", *settings(tmp_path / "runs", old))
    assert refused.code != 0
    assert "SGLang 0.4.1 is not supported; install SGLang 0.5" in refused.stderr
    assert not (tmp_path / "runs").exists()
