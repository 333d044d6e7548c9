"""Where a ``headwater serve`` runs: in a process that this one starts, or wherever someone else has started it."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from headwater.backends import SERVER_KEY, BackendContext, other_model
from headwater.backends.launch.child import HOST, ChildServer, Command, StartChild
from headwater.backends.launch.keeper import ServerProcess
from headwater.backends.native.client import ConnectionLost, ServerClient
from headwater.config.schema import Dtype, EngineConfig
from headwater.core.errors import ConfigError, RolloutFailed, WaitTimeout
from headwater.core.waits import named_wait
from headwater.serving.options import KEY_VARIABLE

SERVE = (sys.executable, "-m", "headwater.cli.main", "serve")
_OPTIONS = ("--host", HOST, "--port", "0", "--until-eof")
_READY = re.compile(r"^serving .* at (http://\S+)$", re.MULTILINE)
_REMEDY = "try it alone with `headwater serve`, or use rollout.placement=colocated"
_REMEDY_FOREIGN = "look at its log, or remove it from rollout.servers"
_HEARTBEAT_S = 30.0
_OWN_HEARTBEAT_S = 120.0
"""For a process that this one has started: it is killed and replaced if it gives no sign of life in half that time.
Long, because a new process must load the model."""
_NUM_BYTES_SHOWN = 200
_RETRY_S = 0.5
_PROBE_S = 5.0
"""How long a server may take to answer whether it is healthy."""


@dataclass(frozen=True)
class OwnServer:
    """A server that this process starts and that only this process can talk to."""

    model: str
    arguments: Sequence[str] = ()
    dtype: Dtype = "auto"
    """The number type of its weights."""
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    remedy: str = _REMEDY
    heartbeat_s: float = _OWN_HEARTBEAT_S
    start_child: StartChild = ChildServer.start
    """Starts it on this machine, or elsewhere."""

    async def start(self) -> ServerProcess:
        arguments = (*SERVE, self.model, *_OPTIONS, "--dtype", self.dtype, *self.arguments)
        return await self.start_child(Command(arguments, self.model, _READY, {KEY_VARIABLE: self.api_key}))


@dataclass(frozen=True)
class ForeignServer:
    """A server that someone else has started."""

    url: str
    api_key: str = ""
    timeout_s: float = 120.0
    """How long it may be unreachable before it is given up."""
    owns_weights: bool = True
    """Whether this process decides which weights it uses."""
    remedy: str = _REMEDY_FOREIGN

    @property
    def heartbeat_s(self) -> float:
        return min(_HEARTBEAT_S, self.timeout_s / 2)

    async def start(self) -> ServerProcess:
        client = ServerClient(self.url, self.api_key)
        try:
            return await RunningServer.reach(self.url, lambda: self._probe(client), self.timeout_s)
        finally:
            await client.close()

    async def _probe(self, client: ServerClient) -> None:
        status, body = await client.get("/get_server_info")
        if status in (401, 403):
            raise RolloutFailed(f"{self.url} refuses access: {_shown(body)}; set the environment variable {SERVER_KEY}")
        if status >= 500:
            raise ConnectionLost(f"status {status}: {_shown(body)}")
        try:
            info = json.loads(body)
            is_ours = status == 200 and "instance" in info and "capabilities" in info
        except (ValueError, TypeError):
            is_ours = False
        if not is_ours:
            raise RolloutFailed(
                f"{self.url} is not a `headwater serve` of this version (status {status}: {_shown(body)}); correct "
                "rollout.servers, or set rollout.backend to the kind of this server"
            )


def _shown(body: bytes) -> str:
    return repr(body[:_NUM_BYTES_SHOWN].decode(errors="replace"))


def engine_arguments(config: EngineConfig, *, shares_device: bool) -> list[str]:
    """All settings of the engine, as ``headwater serve`` takes them."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    if config.kv_cache_gib:
        values["memory_fraction"] = 0.0  # a recipe's, which the size on the command line has replaced
    elif shares_device:
        # A server alone on a device takes most of the free memory, which the learner needs here.
        values["memory_fraction"] = config.chosen_memory_fraction(has_gpu_alone=False)
    return [f"engine.{name}={json.dumps(value)}" for name, value in values.items()]


def check_running(context: BackendContext, url: str, info: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a running server does not fit the config: another model, or not deterministic."""
    config = context.config
    if config.engine.deterministic and not info.get("deterministic"):
        raise ConfigError(
            [
                f"engine.deterministic = true: the server {url} was started without it; start it with `headwater serve "
                "... engine.deterministic=true`"
            ]
        )
    if (problem := other_model(context, info["vocab_size"])) is not None:
        raise ConfigError([f"rollout.servers: {url} serves {info['model_path']}, {problem}"])


class RunningServer:
    """A server at a URL. Ending it means to end the connection to it: its process belongs to someone else."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lost = asyncio.Event()

    @classmethod
    async def reach(cls, url: str, probe: Callable[[], Awaitable[None]], limit_s: float) -> RunningServer:
        """Wait until the server answers. ``probe`` asks it, and raises ``OSError`` or ``RolloutFailed`` if it does not.

        After ``limit_s``, raise ``RolloutFailed`` with the last error.
        """
        last = "it has not answered yet"

        async def ask() -> None:
            nonlocal last
            while True:
                try:
                    await asyncio.wait_for(probe(), _PROBE_S)
                    return
                except TimeoutError:
                    last = f"no answer within {_PROBE_S:g} s"
                except (OSError, RolloutFailed) as error:
                    last = str(error)
                await asyncio.sleep(_RETRY_S)

        try:
            await named_wait(
                ask(), lambda: f"the server {url} answers; {last}", hard_limit_s=limit_s, kind="server_reached"
            )
        except WaitTimeout as error:
            raise RolloutFailed(
                f"the server {url} cannot be reached, after {limit_s:g} s of attempts (rollout.server_timeout_s): "
                f"{last}; start it, or correct rollout.servers"
            ) from error
        return cls(url)

    @property
    def name(self) -> str:
        return f"server {self.url}"

    @property
    def last_lines(self) -> str:
        return ""

    async def wait(self) -> str:
        await self._lost.wait()
        return f"{self.name} ended or stopped answering"

    def kill(self) -> None:
        self._lost.set()

    async def stop(self) -> None:
        self._lost.set()
