"""A vLLM server that a run starts and keeps alive."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.backends import BackendContext
from headwater.backends.launch.child import HOST, ChildServer, Command, StartChild
from headwater.backends.launch.keeper import ChildKeeper, ServerProcess
from headwater.backends.vllm.http import HttpLink
from headwater.backends.vllm.link import INSIDE
from headwater.backends.vllm.session import Session
from headwater.backends.vllm.wire import STREAM_INTERVAL
from headwater.config.schema import Config
from headwater.core.errors import ConfigError, RolloutFailed

CHILD = INSIDE / "headwater_vllm_child.py"
_READY = re.compile(r"^vLLM serves at (http://\S+)$", re.MULTILINE)
_REMEDY = "try its command alone, or change rollout.launch.args"
_CPU_CACHE_GIB = 1.0
_SHARED_FRACTION = 0.4
"""Share of a GPU's memory for a server on the device of the learner."""


def command(context: BackendContext, model: Path, devices: Sequence[str], *, shares_device: bool = False) -> Command:
    """How a server of the run's model starts on ``devices``."""
    config = context.config
    launch = config.rollout.launch
    python = str(Path(launch.python).expanduser()) if launch.python else sys.executable
    if launch.python and not os.access(python, os.X_OK):
        raise ConfigError([f"rollout.launch.python = {launch.python}: no such program; give the path of a Python"])
    is_on_cpu = devices[0] == "cpu"
    settings = engine_settings(config, is_on_cpu=is_on_cpu, shares_device=shares_device)
    settings |= {"model": model, "tensor_parallel_size": len(devices), "uvicorn_log_level": "warning"}
    arguments = [python, str(CHILD), *_options(settings), *(["--enforce-eager"] if is_on_cpu else [])]
    environment = _environment(is_other_python=python != sys.executable)
    if not is_on_cpu and not context.places:  # in a cluster, its process sees only the GPUs that are reserved for it
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(_visible, devices))
    return Command([*arguments, *launch.args], f"{context.model_path} with vLLM", _READY, environment)


def engine_settings(config: Config, *, is_on_cpu: bool, shares_device: bool) -> dict[str, Any]:
    """The settings of the run by the names of vLLM's engine arguments."""
    engine = config.engine
    settings: dict[str, Any] = {
        "served_model_name": "policy",
        "dtype": config.model.dtype,
        "max_model_len": config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        "seed": config.run.seed,
        # Log-probs under the distribution that was sampled from: temperature and truncation applied.
        "logprobs_mode": "processed_logprobs",
        "stream_interval": STREAM_INTERVAL,
        "enable_prefix_caching": engine.prefix_cache,
        "max_num_seqs": engine.max_sequences,
        "max_num_batched_tokens": engine.max_prefill_tokens,
        "block_size": engine.page_tokens,
        "kv_cache_memory_bytes": int((engine.kv_cache_gib or (_CPU_CACHE_GIB if is_on_cpu else 0)) * 2**30),
    }
    if not is_on_cpu and not engine.kv_cache_gib:
        settings["gpu_memory_utilization"] = engine.memory_fraction or (_SHARED_FRACTION if shares_device else 0)
    return {name: value for name, value in settings.items() if value not in (0, 0.0) or isinstance(value, bool)}


def _options(settings: Mapping[str, Any]) -> Iterator[str]:
    """As options of a command line."""
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            yield from (f"--{option}", str(value))


def _environment(*, is_other_python: bool) -> dict[str, str]:
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weight updates and what it tells about itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": HOST,  # where it listens
        "HF_HUB_OFFLINE": "1",  # the model is a folder
    }
    if is_other_python:
        environment["PYTHONPATH"] = ""  # packages of this Python would hide those of the other
    return environment


def _visible(device: str) -> str:
    """A device of this process by the name that a new process needs."""
    index = int(device.partition(":")[2] or 0)
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return visible[index] if visible else str(index)


class LaunchedServer:
    """Starts vLLM, and starts it again when it dies. A ``Service`` of its keeper; belongs to one event loop."""

    def __init__(self, session: Session, how: Command, start_child: StartChild = ChildServer.start) -> None:
        self.keeper = ChildKeeper(self, _REMEDY)
        self.pid = 0
        """The id of the process that serves now."""
        self._session = session
        self._command = how
        self._start_child = start_child
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

    async def start_child(self) -> ServerProcess:
        child = await self._start_child(self._command)
        self.pid = getattr(child, "pid", 0)  # 0 for a process on another machine
        return child

    async def on_up(self, child: ServerProcess) -> None:
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
