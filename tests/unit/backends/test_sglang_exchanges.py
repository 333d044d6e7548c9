"""The SGLang backend over exchanges that were recorded from a real server (``sglang_exchanges/``)."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from backends.group_member import GroupMember
from backends.sglang_exchanges.conversation import NUM_TOKENS, same_every_time, talk, weights
from player import serving

from headwater.backends.sglang import http as http_module
from headwater.backends.sglang.wire import dialect_of, write_request
from headwater.core.errors import RequestError

FILES = sorted((Path(__file__).parent / "sglang_exchanges").glob("*.jsonl"))


class Tape:
    """Answers as it was recorded, as long as the calls are those of the recording, in its order."""

    def __init__(self, exchanges: list[dict[str, Any]]) -> None:
        # Health checks and the metrics they read depend on the time, so GET calls may come at any time, or not at all.
        self._told = {each["path"]: each for each in exchanges if each["method"] == "GET"}
        self.heard = exchanges
        self.left = [each for each in exchanges if each["method"] != "GET"]
        self.others: list[Any] = []
        """Calls that differ from the recording."""
        self.generating = threading.Event()
        self.member = GroupMember()
        self._num_begun = 0
        self._has_begun = asyncio.Condition()

    async def __call__(self, request: web.Request) -> web.Response:
        call = {"method": request.method, "path": request.path}
        call["body"] = same_every_time(request.path, await request.read())
        if request.method == "GET" and request.path not in self._told:
            return web.Response(status=404)
        recorded = self._told[request.path] if request.method == "GET" else self.left[0] if self.left else None
        if recorded is None or call != {name: recorded[name] for name in call}:
            self.others.append(call)
            async with self._has_begun:
                self._has_begun.notify_all()
            return web.Response(status=400, text=f"not the recorded call, {recorded}")
        if request.method != "GET":
            self.left.pop(0)
            await self._until_answered(recorded, await request.json())
        kind = "text/event-stream" if (call["body"] or {}).get("stream") else "application/json"
        return web.Response(status=recorded["status"], text=recorded["text"], content_type=kind)

    async def _until_answered(self, recorded: dict[str, Any], body: dict[str, Any]) -> None:
        """What the server did, and the calls that began before it answered."""
        async with self._has_begun:
            self._num_begun += 1
            num_begun = self._num_begun + recorded.get("num_during", 0)
            self._has_begun.notify_all()
            if recorded["path"] == "/generate":
                self.generating.set()
            await self._has_begun.wait_for(lambda: self.others or self._num_begun >= num_begun)
        if recorded["path"] == "/init_weights_update_group":
            await self.member.join(body)
        elif recorded["path"] == "/update_weights_from_distributed":
            await self.member.receive(body)


def play(file: Path) -> tuple[Tape, dict[str, Any], dict[str, Any]]:
    """The tape after the conversation, what the backend heard now, and what it heard from the real server."""
    heard, *exchanges = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tape = Tape(exchanges)
    with serving(web.route("*", "/{path:.*}", tape)) as url:
        return tape, talk(url, tape.generating), heard["heard"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_conversation_is_held_again(file):
    tape, again, heard = play(file)
    assert not tape.others
    assert not tape.left
    assert again == heard
    version, _, form = file.stem.partition("-")
    assert again["info"][0] == version
    assert dialect_of(version).labels_tokens == again["info"][1]
    asked = [each["body"] for each in tape.heard if each["path"] == "/generate"]
    assert sum(each["stream"] for each in asked) == (len(asked) if form else 1)
    for version in (1, 2):
        tokens, logprobs, versions, reason = again[f"sampled-{version}"]
        assert (len(tokens), len(logprobs), versions, reason) == (11, 11, [version] * 11, "length")
        assert again[f"stopped-{version}"][0][-1] % 3 == 0
        assert again[f"stopped-{version}"][3] == "stop"
    assert len(again["streamed"]) == 10
    for name, before, after in (("interrupted", 3, 4), ("in flight", 4, 5)):
        tokens, _, versions, reason = again[name]
        num_before = versions.count(before)
        assert 0 < num_before < NUM_TOKENS, name
        assert versions == [before] * num_before + [after] * (NUM_TOKENS - num_before), name
        assert (len(tokens), reason) == (NUM_TOKENS, "length")
    tokens, _, versions, reason = again["aborted"]
    assert 0 < len(tokens) < NUM_TOKENS
    assert (set(versions), reason) == ({5}, "abort")
    sent = weights(5)
    assert tape.member.received.keys() == sent.keys()
    assert all(torch.equal(tape.member.received[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_another_conversation_is_noticed(file, monkeypatch):
    def other(*asked, **settings):
        body = write_request(*asked, **settings)
        return body | {"sampling_params": body["sampling_params"] | {"top_p": 0.9}}

    monkeypatch.setattr(http_module, "write_request", other)
    with pytest.raises(RequestError, match="not the recorded call"):
        play(file)


def test_there_is_a_recording():
    assert FILES
