"""Tools of MCP servers: real server processes, over stdio and HTTP, which fail and die."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import free_port
from tools.boxes import call, row, toolbox

from headwater.core.errors import HeadwaterError
from headwater.core.tool_calls import ToolResult
from headwater.data.media import MediaSettings
from headwater.tools.session import ToolSession
from headwater.tools.toolbox import Toolbox

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": sys.executable, "args": [SERVER], "start_timeout_s": 120}


def make(tmp_path: Path, config: dict[str, Any], **settings: Any) -> Toolbox:
    path = tmp_path / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": [{"use": "mcp", "config": config}]}))
    return toolbox(config=str(path), **{"timeout_s": 120, **settings})


async def until_available(session: ToolSession, limit_s: float = 120) -> ToolResult:
    deadline = time.monotonic() + limit_s
    while True:
        result = await session.call(call("add", a=1, b=2))
        if result.failure is None or time.monotonic() > deadline:
            return result
        assert result.failure == "unavailable"
        await asyncio.sleep(0.05)


def test_a_shared_server_fails_dies_and_is_restarted(tmp_path):
    tools = ["add", "fail", "process_id", "show"]
    box = make(tmp_path, {**STDIO, "max_restarts": 1, "tools": tools}, media=MediaSettings())
    assert box.names == tools
    schema = box.schemas(row())[0]["function"]
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["required"] == ["a", "b"]

    async def run() -> None:
        async with box.open(row()) as session:
            results = await asyncio.gather(*(session.call(call("add", a=number, b=1)) for number in range(5)))
            assert [each.text for each in results] == ["1", "2", "3", "4", "5"]
            shown = await session.call(call("show", color="red"))
            assert (shown.text, shown.media[0].images()[0].getpixel((0, 0))) == ("All red.", (255, 0, 0))
            assert (await session.call(call("fail", kind="raise"))).failure == "raised"
            assert (await session.call(call("fail", kind="explode"))).failure == "bad_arguments"
            server = int((await session.call(call("process_id"))).text)
            hanging = asyncio.ensure_future(session.call(call("fail", kind="hang")))
            await asyncio.sleep(0.2)
            os.kill(server, signal.SIGKILL)
            result = await hanging
            assert (result.failure, "MCP server mcp" in result.text) == ("unavailable", True)
            assert "being restarted" in (await session.call(call("add", a=1, b=2))).text
            assert (await until_available(session)).text == "3"
            assert int((await session.call(call("process_id"))).text) != server
            assert (await session.call(call("fail", kind="die"))).failure == "unavailable"
            deadline = time.monotonic() + 60
            while (
                "was restarted 1 times and is gone again; raise max_restarts"
                not in (gone := await session.call(call("add", a=1, b=2))).text
            ):
                assert gone.failure == "unavailable"
                assert time.monotonic() < deadline, gone
                await asyncio.sleep(0.05)
        await box.close()

    asyncio.run(run())


def test_a_server_for_each_episode(tmp_path):
    box = make(tmp_path, {**STDIO, "sessions": "episode"})

    async def episode(uid: str) -> tuple[list[str], int]:
        async with box.open(row(uid)) as session:
            texts = [(await session.call(call("count", by=2))).text for _ in range(2)]
            server = int((await session.call(call("process_id"))).text)  # another tool of the same server
            if uid == "b":
                assert (await session.call(call("fail", kind="die"))).failure == "unavailable"
                assert (await session.call(call("count"))).failure == "unavailable"
            return texts, server

    async def run():
        results = await asyncio.gather(episode("a"), episode("b"))
        await box.close()
        return results

    (first, first_server), (second, second_server) = asyncio.run(run())
    assert first == second == ["2", "4"]
    assert first_server != second_server
    deadline = time.monotonic() + 60
    while left := [each for each in (first_server, second_server) if Path(f"/proc/{each}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.fixture
def http_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait(60)


def test_a_server_over_http(tmp_path, http_server):
    url, process = http_server
    servers = {"shop": {"url": url, "headers": {"X-Test": "1"}}}
    box = make(tmp_path, {"servers": servers, "prefix": True, "max_restarts": 0, "start_timeout_s": 120})
    assert box.names == ["shop_add", "shop_count", "shop_fail", "shop_process_id", "shop_show"]

    async def run() -> None:
        async with box.open(row()) as session:
            assert (await session.call(call("shop_add", a=1, b=2))).text == "3"
            assert int((await session.call(call("shop_process_id"))).text) == process.pid
            assert (await session.call(call("shop_fail", kind="raise"))).failure == "raised"
            hanging = asyncio.ensure_future(session.call(call("shop_fail", kind="hang")))
            await asyncio.sleep(0.3)
            process.kill()
            assert (await hanging).failure in ("unavailable", "raised")
            assert (await session.call(call("shop_add", a=1, b=2))).failure == "unavailable"
        await box.close()

    asyncio.run(run())


def test_a_server_that_does_not_start_is_found_before_training(tmp_path):
    failing = [sys.executable, "-c", "import sys; sys.exit('the licence has expired')"]
    for config, expected in (
        ({"command": failing[0], "args": failing[1:], "start_timeout_s": 120}, "the licence has expired"),
        ({"command": "no-such-command"}, "No such file or directory: 'no-such-command'"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be reached"),
    ):
        with pytest.raises(HeadwaterError, match=rf"tools.yaml: tools\[0\]: MCP server mcp .*{expected}"):
            make(tmp_path, config)
