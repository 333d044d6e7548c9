"""A vLLM server that a run starts and keeps alive."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from headwater.backends import BackendContext
from headwater.backends.launch.child import ChildServer, Command
from headwater.backends.launch.keeper import ChildKeeper
from headwater.backends.vllm.http import HttpLink
from headwater.backends.vllm.session import Session
from headwater.backends.vllm.wire import STREAM_INTERVAL
from headwater.config.schema import Config, EngineConfig
from headwater.core.errors import ConfigError, RolloutFailed

CHILD = Path(__file__).with_name("child.py")
_READY = re.compile(r"^vLLM serves at (http://\S+)$", re.MULTILINE)
_REMEDY = "try its command alone, or change rollout.launch.args"
_CPU_CACHE_GIB = 1.0
_SHARED_FRACTION = 0.4
"""Share of a GPU's memory for a server on the device of the learner."""


def command(
    context: BackendContext, model: Path, devices: Sequence[str], *, max_tokens: int, shares_device: bool = False
) -> Command:
    """How a server of the run's model starts on ``devices``."""
    config = context.config
    launch = config.rollout.launch
    python = str(Path(launch.python).expanduser()) if launch.python else sys.executable
    if launch.python and not os.access(python, os.X_OK):
        raise ConfigError([f"rollout.launch.python = {launch.python}: no such program; give the path of a Python"])
    on_cpu = devices[0] == "cpu"
    arguments = [python, str(CHILD), *_arguments(config, model, max_tokens)]
    arguments += ["--tensor-parallel-size", str(len(devices))] if len(devices) > 1 else []
    arguments += ["--enforce-eager"] if on_cpu else _gpu_memory(config.engine, shares_device)
    environment = _environment(config, devices, is_other_python=python != sys.executable)
    return Command([*arguments, *launch.args], f"{context.model_path} with vLLM", _READY, environment)


def _arguments(config: Config, model: Path, max_tokens: int) -> list[str]:
    engine = config.engine
    needed = min(max_tokens, config.data.max_prompt_tokens + config.rollout.max_new_tokens)
    arguments = ["--model", str(model), "--served-model-name", "policy", "--dtype", config.model.dtype]
    arguments += ["--max-model-len", str(needed), "--seed", str(config.run.seed)]
    # Log-probs under the distribution that was sampled from: temperature and truncation applied.
    arguments += ["--logprobs-mode", "processed_logprobs"]
    arguments += ["--stream-interval", str(STREAM_INTERVAL), "--uvicorn-log-level", "warning"]
    arguments += ["--enable-prefix-caching" if engine.prefix_cache else "--no-enable-prefix-caching"]
    if engine.max_sequences:
        arguments += ["--max-num-seqs", str(engine.max_sequences)]
    if engine.max_prefill_tokens:
        arguments += ["--max-num-batched-tokens", str(engine.max_prefill_tokens)]
    if engine.page_tokens:
        arguments += ["--block-size", str(engine.page_tokens)]
    return arguments


def _gpu_memory(engine: EngineConfig, shares_device: bool) -> list[str]:
    if engine.kv_cache_gib:
        return ["--kv-cache-memory-bytes", str(int(engine.kv_cache_gib * 2**30))]
    fraction = engine.memory_fraction or (_SHARED_FRACTION if shares_device else 0)
    return ["--gpu-memory-utilization", str(fraction)] if fraction else []


def _environment(config: Config, devices: Sequence[str], *, is_other_python: bool) -> dict[str, str]:
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weight updates and what it tells about itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
    }
    if is_other_python:
        environment["PYTHONPATH"] = ""  # packages of this Python would hide those of the other
    if devices[0] == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = f"{max(1, round(config.engine.kv_cache_gib or _CPU_CACHE_GIB))}"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(_visible, devices))
    return environment


def _visible(device: str) -> str:
    """A device of this process by the name that a new process needs."""
    index = int(device.partition(":")[2] or 0)
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return visible[index] if visible else str(index)


class LaunchedServer:
    """Starts vLLM, and starts it again when it dies. A ``Service`` of its keeper; belongs to one event loop."""

    def __init__(self, session: Session, how: Command) -> None:
        self.keeper = ChildKeeper(self, _REMEDY)
        self._session = session
        self._command = how
        self._link: HttpLink | None = None
        session.on_progress = self.keeper.note_progress

    @property
    def url(self) -> str:
        return self._link.url if self._link is not None else ""

    @property
    def num_restarts(self) -> int:
        return self.keeper.num_restarts

    async def start(self) -> None:
        await self.keeper.start()

    async def end(self) -> None:
        await self.keeper.end()

    # What the keeper calls

    @property
    def num_open(self) -> int:
        return self._session.num_open

    async def start_child(self) -> ChildServer:
        return await ChildServer.start(self._command)

    async def on_up(self, child: ChildServer) -> None:
        self._link = HttpLink(child.url)
        await self._session.attach(self._link, await self._link.describe())

    async def until_lost(self) -> None:
        assert self._link is not None, "up"
        await self._session.until_lost(self._link)

    def on_lost(self) -> None:
        if self._link is not None:
            self._session.lost(self._link, "its process ended or does not answer")

    async def on_down(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._session.lost(link, "its process ended")
            await link.close()

    def on_failure(self, failure: RolloutFailed) -> None:
        self._session.fail(failure)
