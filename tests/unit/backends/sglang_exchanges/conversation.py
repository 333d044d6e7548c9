"""A conversation of the backend with an SGLang server, to be recorded or played.

    python tests/unit/backends/sglang_exchanges/conversation.py PYTHON FILE

starts the SGLang that is installed for PYTHON on the CPU, and writes what both sides say to FILE, a line per exchange,
in the order in which the calls began. If other calls began before one was answered, it has their number,
``num_during``. The first line has what the backend made of the answers.

If the name of FILE ends with ``-incremental``, all responses are streamed. Otherwise the backend is not told that the
server can add new tokens to a stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web

from headwater.backends import BackendContext
from headwater.backends.sglang.engine import SglangEngine
from headwater.backends.sglang.http import SglangLink
from headwater.config.load import load_config
from headwater.core.capabilities import ALL_TAGS, UpdateMode
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.spans import Spans

MODEL = "tiny:qwen3"
LIMIT_S = 900.0
NUM_TOKENS = 200
"""Of a response that something happens to while it is generated."""
GENERATING_S = 0.5
"""How long the real server generates before that happens."""
SERVER_KEYS = (
    "version", "model_path", "dtype", "startup_time", "random_seed", "context_length", "max_req_input_len",
    "max_running_requests", "device", "disable_overlap_schedule", "enable_memory_saver", "tp_size",
    "incremental_streaming_output",
)  # fmt: skip
"""What is kept of ``/server_info``, which has hundreds of settings, among them the API key."""


def context(*settings: str) -> BackendContext:
    base = ["rollout.backend=sglang", "data.max_prompt_tokens=64", "rollout.max_new_tokens=256", f"model.path={MODEL}"]
    config = with_dtype(load_config("quickstart", [*base, *settings]).config)
    return BackendContext(config, MODEL, load_tokenizer(MODEL), Spans())


def talk(url: str, generating: threading.Event) -> dict[str, Any]:
    """Returns what the backend made of the answers. ``generating`` is set when the server generates a response."""
    with closing(_connect(url, "file")) as engine:
        heard = _with_files(engine)
    with closing(_connect(url, "collective")) as engine:
        heard |= _over_a_group(engine, generating)
    asyncio.run(_steer(url))
    return heard


def _connect(url: str, transfer: str) -> SglangEngine:
    return SglangEngine.connect(url, context(f"rollout.servers=[{url}]", f"rollout.weight_transfer={transfer}"))


def _with_files(engine: SglangEngine) -> dict[str, Any]:
    """Updates in two modes, whole and streamed responses, a pause."""
    heard: dict[str, Any] = {
        "info": [
            engine.status().settings["sglang"], "in_flight" in engine.capabilities.update_modes,
            engine.limits.max_model_tokens,
        ]
    }  # fmt: skip
    for version, mode in ((1, "interrupt"), (2, "in_flight")):
        _update(engine, version, mode)
        for name, sampling in {
            "greedy": SamplingParams(8, temperature=0.0, ignore_end=True),
            "sampled": SamplingParams(12, temperature=0.8, ignore_end=True),
            "stopped": SamplingParams(64, stop_token_ids=tuple(range(0, 400, 3))),
        }.items():
            request = ModelRequest(f"{name}-{version}", (5, 6, 7), sampling, rng_key=version, given_tokens=(8,))
            heard[request.request_id] = _kept(asyncio.run(engine.agenerate(request)))
    engine.pause()
    engine.resume()
    heard["streamed"] = asyncio.run(_follow(engine))
    return heard


def _over_a_group(engine: SglangEngine, generating: threading.Event) -> dict[str, Any]:
    """Updates before and during responses, and one that is aborted."""
    _update(engine, 3, "interrupt")
    return {
        "interrupted": _during(engine, "interrupted", generating, lambda: _update(engine, 4, "interrupt")),
        "in flight": _during(engine, "in flight", generating, lambda: _update(engine, 5, "in_flight")),
        "aborted": _during(engine, "aborted", generating, lambda: engine.abort("aborted")),
    }


async def _steer(url: str) -> None:
    """An update after one that has been left open, and memory that is released, which an engine asks for only if the
    server was started with the option for it."""
    link = SglangLink(url)
    try:
        await link.describe()
        for _ in range(2):
            await link.begin_update()
        await link.end_update()
        await link.pause("abort")
        await link.sleep(ALL_TAGS)
        await link.wake(ALL_TAGS)
        await link.resume()
    finally:
        await link.close()


def weights(version: int) -> dict[str, torch.Tensor]:
    return dict(load_model(MODEL, dtype="float32", device="cpu", seed=version).named_parameters())


def _update(engine: SglangEngine, version: int, mode: UpdateMode) -> None:
    engine.update_weights(WeightUpdate.of(version, weights(version).items()), mode).result(LIMIT_S)


def _during(engine: SglangEngine, name: str, generating: threading.Event, action: Callable[[], object]) -> list[Any]:
    """The response during which ``action`` happens."""
    request = ModelRequest(name, (5, 6, 7), SamplingParams(NUM_TOKENS, ignore_end=True), rng_key=7)
    generating.clear()
    with ThreadPoolExecutor(1) as thread:
        response = thread.submit(lambda: asyncio.run(engine.agenerate(request)))
        assert generating.wait(LIMIT_S)
        action()
        return _kept(response.result(LIMIT_S))


def _kept(done: ModelResponse) -> list[Any]:
    return [list(done.output_tokens), list(done.output_logprobs), list(done.output_versions), done.stop_reason]


async def _follow(engine: SglangEngine) -> list[int]:
    request = ModelRequest("streamed", (5, 6, 7), SamplingParams(10, temperature=0.0, ignore_end=True), rng_key=3)
    return [token async for delta in engine.astream(request) for token in delta.tokens]


def same_every_time(path: str, body: bytes) -> Any:
    """What a call says, without the names of temporary folders, of groups and of the run."""
    said = json.loads(body) if body else None
    if path == "/update_weights_from_disk":
        said["model_path"] = "/weights"
    if isinstance(said, dict) and "extra_key" in said:
        said["extra_key"] = said["extra_key"].rpartition("-")[2]
    if isinstance(said, dict) and "group_name" in said:
        said |= {"group_name": "group"} | ({"master_port": 0} if "master_port" in said else {})
    return said


def without_secrets(path: str, text: str) -> str:
    """What a server answers, without its API key and the names of temporary folders and groups."""
    text = re.sub(r'"/[^"]*headwater-model-[^"]*"', '"/model"', text)
    text = re.sub(r"headwater-[0-9a-f]{12}", "group", text)
    if path != "/server_info":
        return text
    return json.dumps({name: each for name, each in json.loads(text).items() if name in SERVER_KEYS})


class Recorder:
    """Passes calls on to a server, and keeps them. Of questions about the server, it keeps the first of each path."""

    def __init__(self, url: str, key: str, *, is_incremental: bool) -> None:
        self._url, self._key = url, key
        self._is_incremental = is_incremental
        self.exchanges: list[dict[str, Any]] = []
        self.generating = threading.Event()

    async def __call__(self, request: web.Request) -> web.Response:
        body, method, path = await request.read(), request.method, request.path
        exchange = {"method": method, "path": path, "body": same_every_time(path, body)}
        if method != "GET" or path not in (each["path"] for each in self.exchanges):
            self.exchanges.append(exchange)
        if path == "/generate":
            asyncio.get_running_loop().call_later(GENERATING_S, self.generating.set)
        num_begun = self._num_begun
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, self._url + path, data=body) as reply,
        ):
            text = await reply.text()
        if path == "/server_info":
            text = json.dumps({**json.loads(text), "incremental_streaming_output": self._is_incremental})
        exchange |= {"status": reply.status, "text": without_secrets(path, text)}
        if method != "GET" and (num_during := self._num_begun - num_begun):
            exchange["num_during"] = num_during
        return web.Response(status=reply.status, text=text, content_type=reply.content_type)

    @property
    def _num_begun(self) -> int:
        return sum(each["method"] != "GET" for each in self.exchanges)


def record(engine: SglangEngine, file: Path) -> None:
    """Connect to the server of ``engine`` through a recorder."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from player import serving

    recorder = Recorder(engine.url, engine.api_key, is_incremental=file.stem.endswith("-incremental"))
    with serving(web.route("*", "/{path:.*}", recorder)) as url:
        heard = talk(url, recorder.generating)
    lines = [json.dumps(each) for each in ({"heard": heard}, *recorder.exchanges)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(python: str, file: str) -> None:
    launch = ["rollout.placement=disaggregated", f"rollout.launch.python={python}", "engine.update_mode=in_flight"]
    engine = SglangEngine.launch(context(*launch, "rollout.launch.args=[--max-total-tokens, '8192']"), ["cpu"])
    try:
        record(engine, Path(file))
    finally:
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
