"""Where a session gets its connection: from a server that runs already, or one that the run starts and keeps alive."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from headwater.backends import BackendContext
from headwater.backends.launch.child import HOST, ChildServer, Command, StartChild
from headwater.backends.launch.keeper import ChildKeeper, ServerProcess
from headwater.backends.remote.link import LinkLost, ServerInfo, ServerLink
from headwater.backends.remote.session import RemoteSession
from headwater.core.errors import ConfigError, HeadwaterError, RolloutFailed, WaitTimeout

logger = logging.getLogger(__name__)

_CHILD = Path(__file__).parent / "inside" / "headwater_server_child.py"
"""What the Python of the other program runs."""
_READY = re.compile(r"^the server answers at (http://\S+)$", re.MULTILINE)
_RETRY_S = 1.0
_REMEDY = "try its command alone, or change rollout.launch.args"


class HttpLink(ServerLink, Protocol):
    """A link to an address."""

    @property
    def url(self) -> str: ...


class RemoteServer(Protocol):
    """Brings a session its connection, and replaces it. Belongs to the session's event loop."""

    @property
    def url(self) -> str: ...
    @property
    def num_restarts(self) -> int: ...
    async def start(self) -> None:
        """Return when the session is attached."""
        ...

    async def end(self) -> None: ...


class ConnectedServer:
    """A server that runs already. If it is lost, the connection is tried again for a while."""

    def __init__(
        self,
        session: RemoteSession,
        url: str,
        make_link: Callable[[], ServerLink],
        check: Callable[[ServerLink, ServerInfo], Awaitable[None]],
        *,
        limit_s: float,
        is_one_of_many: bool = False,
    ) -> None:
        """``check`` raises if the server cannot be used. ``limit_s`` is how long it may be unreachable.

        One of many may stay away for longer, because the others continue its requests.
        """
        self.url = url
        self.num_restarts = 0
        """How often another process was found at the URL."""
        self._session = session
        self._make_link = make_link
        self._check = check
        self._limit_s = limit_s
        self._is_one_of_many = is_one_of_many
        self._link: ServerLink | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._connect()
        self._watch = asyncio.create_task(self._keep())

    async def end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._drop()

    async def _keep(self) -> None:
        while True:
            assert self._link is not None, "connected"
            try:
                with suppress(LinkLost):
                    await self._session.until_lost(self._link)
                await self._drop()
                await self._connect()
            except HeadwaterError as error:
                self._session.fail(RolloutFailed(str(error)))
                return
            except Exception as error:  # for example, another program answers at this address
                logger.exception("%s: the connection cannot be kept", self._session.name)
                cause = f"the connection cannot be kept: {type(error).__name__}: {error}"
                self._session.fail(RolloutFailed(f"{self._session.name}: {cause}"))
                return

    async def _connect(self) -> None:
        began = time.monotonic()
        while True:
            link = self._make_link()
            try:
                await link.check_alive()
                info = await link.describe()
                is_new, is_first = not self._session.is_known(info), self._session.info is None
                if is_new:  # its weights are not those of this run
                    await self._check(link, info)
                await self._session.attach(link, info)
                self.num_restarts += is_new and not is_first
                self._link = link
                return
            except (LinkLost, WaitTimeout) as error:
                await link.close()
                is_awaited = self._is_one_of_many and self._session.info is not None
                if time.monotonic() - began > self._limit_s and not is_awaited:
                    raise RolloutFailed(
                        f"{self._session.name} cannot be reached, after {self._limit_s:g} s of attempts "
                        f"(rollout.server_timeout_s): {error}; start it, or correct rollout.servers"
                    ) from error
                await asyncio.sleep(_RETRY_S)
            except BaseException:
                await link.close()
                raise

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._session.lost(link, "the connection was closed")
            await link.close()


class LaunchedServer:
    """Starts a server, and starts it again when it dies. A ``Service`` of its keeper; belongs to one event loop."""

    def __init__(
        self,
        session: RemoteSession,
        how: Command,
        make_link: Callable[[str], HttpLink],
        start_child: StartChild = ChildServer.start,
    ) -> None:
        self.keeper = ChildKeeper(self, _REMEDY)
        self.pid = 0
        """The id of the process that serves now."""
        self._session = session
        self._command = how
        self._make_link = make_link
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
        self._link = self._make_link(child.url)
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


def child_command(
    context: BackendContext,
    program: str,
    settings: Mapping[str, Any],
    devices: Sequence[str],
    *,
    api_key: str = "",
    environment: Mapping[str, str] | None = None,
    path: str = "",
) -> Command:
    """How a server of ``program``, ``vllm`` or ``sglang``, starts on ``devices``, with ``settings`` as its options.

    The key is given through the environment, because a command line is visible to others. ``path`` is a folder from
    which its workers import.
    """
    launch = context.config.rollout.launch
    python = str(Path(launch.python).expanduser()) if launch.python else sys.executable
    if launch.python and not os.access(python, os.X_OK):
        raise ConfigError([f"rollout.launch.python = {launch.python}: no such program; give the path of a Python"])
    # Packages of this Python would hide those of another one.
    others = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
    variables = {
        "HEADWATER_CHILD_HOST": HOST,
        "HEADWATER_CHILD_KEY": api_key,
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "PYTHONPATH": os.pathsep.join(filter(None, (path, others))),
        **(environment or {}),
    }
    if devices[0] != "cpu" and not context.places:  # in a cluster, it sees only the GPUs that are reserved for it
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(_visible, devices))
    arguments = [python, str(_CHILD), program, *_options(settings, launch.args), *launch.args]
    return Command(arguments, f"{context.model_path} with {program}", _READY, variables, secret=api_key)


def must_release_memory(context: BackendContext, devices: Sequence[str], *, shares_device: bool) -> bool:
    """Whether a server must be able to release its GPU memory, because the learner takes turns with it."""
    return shares_device and devices[0] != "cpu" and context.config.learner.offload_during_rollout


def _options(settings: Mapping[str, Any], given: Collection[str]) -> Iterator[str]:
    """As options of a command line. None is an option without a value, which is left out if it is ``given``."""
    for name, value in settings.items():
        option = name.replace("_", "-")
        if value is None:
            if f"--{option}" not in given:
                yield f"--{option}"
        elif isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        else:
            yield from (f"--{option}", str(value))


def _visible(device: str) -> str:
    """A device of this process by the name that a new process needs."""
    index = int(device.partition(":")[2] or 0)
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return visible[index] if visible else str(index)
