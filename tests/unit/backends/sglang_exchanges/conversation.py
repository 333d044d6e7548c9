"""A conversation of the backend with an SGLang server, to be recorded or played.

    python tests/unit/backends/sglang_exchanges/conversation.py PYTHON FILE

starts the SGLang that is installed for PYTHON on the CPU, and writes what both sides say to FILE, a line per exchange.
The first line has what the backend made of the answers.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from headwater.backends import BackendContext
from headwater.backends.sglang.engine import SglangEngine
from headwater.config.load import load_config
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.models.device import with_dtype
from headwater.models.load import load_model, load_tokenizer
from headwater.observe.spans import Spans

MODEL = "tiny:qwen3"
LIMIT_S = 900.0
SERVER_KEYS = (
    "version", "model_path", "dtype", "startup_time", "random_seed", "context_length", "max_req_input_len",
    "max_running_requests", "device", "disable_overlap_schedule", "enable_memory_saver", "tp_size",
)  # fmt: skip
"""What is kept of ``/server_info``, which has hundreds of settings, among them the API key."""


def context(*settings: str) -> BackendContext:
    base = ["rollout.backend=sglang", "data.max_prompt_tokens=64", "rollout.max_new_tokens=64", f"model.path={MODEL}"]
    config = with_dtype(load_config("quickstart", [*base, *settings]).config)
    return BackendContext(config, MODEL, load_tokenizer(MODEL), Spans())


def talk(engine: SglangEngine) -> dict[str, Any]:
    """Updates in two modes, whole and streamed responses, a pause. Returns what the backend made of the answers."""
    heard: dict[str, Any] = {
        "info": [
            engine.status().settings["sglang"], "in_flight" in engine.capabilities.update_modes,
            engine.limits.max_model_tokens,
        ]
    }  # fmt: skip
    for version, mode in ((1, "interrupt"), (2, "in_flight")):
        model = load_model(MODEL, dtype="float32", device="cpu", seed=version)
        engine.update_weights(WeightUpdate.of(version, model.named_parameters()), mode).result(LIMIT_S)
        for name, sampling in {
            "greedy": SamplingParams(8, temperature=0.0, ignore_end=True),
            "sampled": SamplingParams(12, temperature=0.8, ignore_end=True),
            "stopped": SamplingParams(64, stop_token_ids=tuple(range(0, 400, 3))),
        }.items():
            request = ModelRequest(f"{name}-{version}", (5, 6, 7), sampling, rng_key=version, given_tokens=(8,))
            done = asyncio.run(engine.agenerate(request))
            heard[request.request_id] = [
                list(done.output_tokens), list(done.output_logprobs), list(done.output_versions), done.stop_reason
            ]  # fmt: skip
    engine.pause()
    engine.resume()
    heard["streamed"] = asyncio.run(_follow(engine))
    return heard


async def _follow(engine: SglangEngine) -> list[int]:
    request = ModelRequest("streamed", (5, 6, 7), SamplingParams(10, temperature=0.0, ignore_end=True), rng_key=3)
    return [token async for delta in engine.astream(request) for token in delta.tokens]


def same_every_time(path: str, body: bytes) -> Any:
    """What a call says, without the names of temporary folders and of the run."""
    said = json.loads(body) if body else None
    if path == "/update_weights_from_disk":
        said["model_path"] = "/weights"
    if isinstance(said, dict) and "extra_key" in said:
        said["extra_key"] = said["extra_key"].rpartition("-")[2]
    return said


def without_secrets(path: str, text: str) -> str:
    """What a server answers, without its API key and the names of temporary folders."""
    text = re.sub(r'"/[^"]*headwater-model-[^"]*"', '"/model"', text)
    if path != "/server_info":
        return text
    return json.dumps({name: each for name, each in json.loads(text).items() if name in SERVER_KEYS})


class Recorder:
    """Passes calls on to a server, and keeps them. Of questions about the server, it keeps the first of each path."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self.exchanges: list[dict[str, Any]] = []

    async def __call__(self, request: web.Request) -> web.Response:
        body, method, path = await request.read(), request.method, request.path
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, self._url + path, data=body) as reply,
        ):
            text = await reply.text()
        if method != "GET" or path not in (each["path"] for each in self.exchanges):
            call = {"method": method, "path": path, "body": same_every_time(path, body)}
            self.exchanges.append(call | {"status": reply.status, "text": without_secrets(path, text)})
        return web.Response(status=reply.status, text=text, content_type=reply.content_type)


def record(engine: SglangEngine, file: Path) -> None:
    """Connect to the server of ``engine`` through a recorder."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from player import serving

    recorder = Recorder(engine.url, engine.api_key)
    with serving(web.route("*", "/{path:.*}", recorder)) as url:
        client = SglangEngine.connect(url, context(f"rollout.servers=[{url}]", "rollout.weight_transfer=file"))
        try:
            heard = talk(client)
        finally:
            client.close()
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
