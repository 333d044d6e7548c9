"""Agents in processes: one ``fork_server.py`` per event loop and agent, which forks a process for every episode."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from headwater.core.errors import AgentFailed, ConfigError
from headwater.core.processes import signal_name
from headwater.core.waits import named_wait
from headwater.workflows.agents import fork_server
from headwater.workflows.agents.runner import OFFERED, AgentEnd, AgentSettings, Invitation

START_LIMIT_S = 300.0
"""Importing an agent's packages may take long on a busy machine."""
_END_LIMIT_S = 10.0
"""How long a killed process may take to end."""

_ENDED = "the process that runs agents ended; see its last messages above"


class AgentProcesses:
    """Starts the fork server with the first episode, and again if it has died."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings

    async def run(self, invitation: Invitation, timeout_s: float) -> AgentEnd:
        server = await ForkServer.here(self._settings)
        return await server.call(invitation, timeout_s)


class ForkServer:
    """The process that forks agents, as seen from the event loop that started it."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count()
        self._running: dict[int, asyncio.Future[AgentEnd]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.is_alive = False

    @classmethod
    async def here(cls, settings: AgentSettings) -> ForkServer:
        """The fork server of the running event loop for this agent."""
        loop, key = asyncio.get_running_loop(), repr(settings)
        servers = _servers.setdefault(loop, {})
        starting = servers.get(key)
        if starting is None or (starting.done() and (starting.exception() or not starting.result().is_alive)):
            starting = servers[key] = loop.create_task(cls(settings)._start())
        return await asyncio.shield(starting)

    @classmethod
    def running(cls, loop: asyncio.AbstractEventLoop) -> list[ForkServer]:
        """The fork servers of an event loop."""
        started = list(_servers.get(loop, {}).values())
        return [each.result() for each in started if each.done() and not each.exception() and each.result().is_alive]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def _start(self) -> ForkServer:
        settings = self._settings
        given = {"agent": settings.agent, "agent_args": dict(settings.agent_args), "offered": OFFERED}
        python = settings.python or sys.executable
        try:
            self._process = await asyncio.create_subprocess_exec(
                python,
                str(Path(fork_server.__file__)),
                json.dumps(given),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the run, which then ends its agents
            )
        except OSError as error:
            raise ConfigError([f"rollout.workflow_args.python = {python}: {error.strerror}"]) from error
        try:
            first = await named_wait(
                self._receive(),
                lambda: f"the agent {settings.agent or settings.command} is being imported",
                kind="agent_start",
                hard_limit_s=START_LIMIT_S,
            )
        except BaseException:
            self._kill()
            raise
        if "failed" in first:
            self._kill()
            await self._ended()
            raise ConfigError([f"rollout.workflow_args.agent = {settings.agent}: {first['failed']}"])
        self.is_alive = True
        self._reader = asyncio.get_running_loop().create_task(self._read())
        return self

    async def call(self, invitation: Invitation, timeout_s: float) -> AgentEnd:
        """Run the agent for one episode. It is killed after ``timeout_s``, and if this call is cancelled."""
        if not self.is_alive:  # it ended after ``here`` returned it
            raise AgentFailed(_ENDED)
        number = next(self._numbers)
        ended = self._running[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, self._message(invitation))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(ended)
        except TimeoutError:
            return AgentEnd("timed_out", reason=f"did not end within {timeout_s:g} s")
        finally:
            if not ended.done():
                self._send("kill", number)
                with contextlib.suppress(TimeoutError, AgentFailed):
                    await asyncio.wait_for(asyncio.shield(ended), _END_LIMIT_S)

    def _message(self, invitation: Invitation) -> dict[str, Any]:
        argv = invitation.fill(self._settings.command)
        own = {name: value for name in ("NO_PROXY", "no_proxy") if (value := os.environ.get(name))}
        direct = ",".join([*dict.fromkeys(own.values()), "127.0.0.1", "localhost"])
        return {
            "argv": argv,
            "stdin": json.dumps(invitation.row_as_json()) if argv else "",
            # A proxy of the machine must not get calls to the machine itself.
            "env": {**invitation.env(), "NO_PROXY": direct, "no_proxy": direct},
            "offered": {} if argv else invitation.offered(),
        }

    def _send(self, *message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        body = pickle.dumps(message)
        with contextlib.suppress(ConnectionError):  # the reader tells all callers
            self._process.stdin.write(fork_server.LENGTH.pack(len(body)) + body)

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            (length,) = fork_server.LENGTH.unpack(await self._process.stdout.readexactly(fork_server.LENGTH.size))
            message: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        except asyncio.IncompleteReadError:
            return {"failed": _ENDED}
        return message

    async def _read(self) -> None:
        """Pass on how agents end, until the fork server ends or the event loop cancels its tasks."""
        reason = "the run is ending"
        try:
            while "failed" not in (message := await self._receive()):
                ended = self._running.pop(message["number"], None)
                if ended is not None and not ended.done():
                    ended.set_result(_end(message))
            reason = message["failed"]
        finally:
            self.is_alive = False
            self._kill()
            for ended in self._running.values():
                if not ended.done():
                    ended.set_exception(AgentFailed(reason))
                    ended.exception()  # perhaps nothing waits for it any more
            self._running.clear()
            await self._ended()

    async def _ended(self) -> None:
        assert self._process is not None
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._process.wait(), _END_LIMIT_S)

    def _kill(self) -> None:
        """End the fork server. Its agents end with it."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[ForkServer]]] = WeakKeyDictionary()


def _end(message: dict[str, Any]) -> AgentEnd:
    output = str(message.get("output", "")).strip()
    match message["outcome"]:
        case "returned":
            return AgentEnd("returned", message["value"], detail=output)
        case "raised":
            return AgentEnd("raised", reason=f"raised {message['error']}", detail=message.get("trace", ""))
        case "exited":
            return AgentEnd("exited", reason=f"exited with status {message['status']}", detail=output)
        case _:
            name = signal_name(message["signal"])
            return AgentEnd("killed", reason=f"was killed by {name}", detail=output)
