"""The dashboard over a running ``headwater serve`` and a ``headwater route`` in front of it."""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import forked
import pytest
from command import ROOT
from ports import free_port
from running import Running

from headwater.dashboard import engine_view

pytestmark = pytest.mark.slow

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    server, port = Running("engine.kv_cache_gib=0.02").start(), free_port()
    router = None
    try:
        url = server.ready().url
        router = forked.popen(
            "-m", "headwater", "route", url, "--port", port, cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/servers", timeout=60):
                    break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, "the router does not answer"
                time.sleep(0.1)
        yield url, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        if router is not None:
            router.kill()
            router.wait()


def test_a_server_and_a_router_are_shown_as_they_are(urls, monkeypatch):
    monkeypatch.setattr(engine_view, "_LIMIT_S", LIMIT_S)  # its seconds may be too few on a busy machine
    server, router, nobody = asyncio.run(engine_view.server_states([*urls, "http://127.0.0.1:9"], ""))["servers"]
    assert (server["is_alive"], server["error"], server["model"]) == (True, "", "tiny:qwen3")
    assert (server["num_running"], server["num_waiting"], server["members"]) == (0, 0, [])
    assert server["kv_used"] is not None
    assert (router["is_alive"], router["model"]) == (True, "tiny:qwen3")
    assert [each["url"] for each in router["members"]] == [urls[0]]
    assert nobody["is_alive"] is False
