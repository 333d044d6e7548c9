"""Sessions with servers of other projects, whose connection fails and whose callers leave at any moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.backends.remote import servers
from headwater.backends.remote.link import LinkLost, ServerInfo
from headwater.backends.remote.requests import OpenRequest, ServedModel
from headwater.backends.remote.servers import ConnectedServer
from headwater.backends.remote.session import RemoteSession
from headwater.core.errors import RolloutFailed, TransferLost, WeightsIncomplete
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.observe.spans import Spans

LIMIT_S = 120.0
INFO = ServerInfo("0.32", "m", "float32", "i1", 100, 10, "cpu", True, True)


class Link:
    """A connection that does what it is asked to, until ``fails`` names the call that does not."""

    url = "http://here"

    def __init__(self) -> None:
        self.fails: set[str] = set()

    async def _call(self, name: str) -> None:
        if name in self.fails:
            raise LinkLost(f"{name} failed")

    async def check_alive(self) -> None:
        await self._call("check_alive")

    async def describe(self) -> ServerInfo:
        if "describe" in self.fails:
            raise KeyError("version")
        return INFO

    async def stream(self, sending: object) -> AsyncIterator[Any]:
        raise LinkLost("gone")
        yield

    async def measure(self) -> dict[str, float]:
        return {}

    async def set_label(self, label: str) -> bool:
        return False

    async def resume(self) -> None:
        await self._call("resume")

    async def pause(self, mode: str) -> None: ...

    async def sleep(self, tags: object) -> None: ...

    async def wake(self, tags: object) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...


def session() -> RemoteSession:
    return RemoteSession("the server", ServedModel(None, ()), Spans())


def opened(number: int, answers: list[Any]) -> OpenRequest:
    request = ModelRequest(f"r{number}", (1,), SamplingParams(max_new_tokens=4), rng_key=number)
    return OpenRequest(number, request, answers.append)


def test_a_caller_that_leaves_at_once_leaves_nothing_behind():
    """The loop of the engine is busy then, and finds its request and its departure together."""

    async def run() -> None:
        waiting = session()
        for number in range(3):
            one = opened(number, [])
            waiting.enter(one)
            waiting.leave(one)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize(("is_alive", "expected"), [(True, WeightsIncomplete), (False, TransferLost)])
def test_an_update_that_fails_because_the_server_ends_is_sent_again(is_alive, expected):
    """A worker that dies is an error of the call at first."""

    async def load(link: Link, label: str) -> None:
        link.fails = set() if is_alive else {"check_alive"}
        raise RolloutFailed("failed with status 500")

    async def run() -> None:
        updated, link = session(), Link()
        await updated.attach(link, INFO)
        with pytest.raises(expected, match="failed with status 500"):
            await updated.update(1, load, "interrupt", limit_s=LIMIT_S)
        assert updated.is_attached == is_alive

    asyncio.run(run())


def test_a_failed_wake_does_not_keep_requests_from_the_server():
    async def run() -> None:
        slept, link = session(), Link()
        await slept.attach(link, INFO)
        await slept.set_asleep(("kv_cache",), True, LIMIT_S)
        link.fails = {"resume"}
        with pytest.raises(LinkLost, match="resume failed"):
            await slept.set_asleep(("kv_cache",), False, LIMIT_S)
        assert slept._gate.is_set()

    asyncio.run(run())


def test_another_program_at_the_address_fails_the_requests_that_wait(monkeypatch):
    monkeypatch.setattr(servers, "_RETRY_S", 0.01)

    async def run() -> list[Any]:
        lost, link, answers = session(), Link(), []

        async def check(link: object, info: object) -> None: ...

        server = ConnectedServer(lost, link.url, lambda: link, check, limit_s=LIMIT_S)
        await server.start()
        link.fails = {"check_alive"}
        lost.enter(opened(0, answers))
        deadline = time.monotonic() + LIMIT_S
        while lost.is_attached:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        link.fails = {"describe"}
        while not answers:
            assert time.monotonic() < deadline, "the request was not answered"
            await asyncio.sleep(0.01)
        await server.end()
        return answers

    (failure,) = asyncio.run(run())
    assert "the connection cannot be kept: KeyError: 'version'" in str(failure)
