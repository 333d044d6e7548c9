"""A server as a child process that ends with this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headwater.backends.launch.keeper import ServerProcess
from headwater.core.errors import RolloutFailed
from headwater.core.processes import signal_name
from headwater.core.waits import ENGINE_START_LIMIT_S, named_wait

_STOP_LIMIT_S = 15.0
_LAST_WORDS_S = 1.0
"""How long its output is read after it has ended. A process that it left behind may keep the pipe open forever."""
_LOOK_S = 0.05
_TAIL_CHARACTERS = 4000
_ERROR = re.compile(r"^(?:.*[\])] )?\w+(?:Error|Exception): .+$", re.MULTILINE)
"""The last line of a traceback, also behind what a logger writes before it."""
HOST, PORT = "{host}", "{port}"
"""Arguments of a command that are known only where it runs: the address to listen on, and a free port there."""


@dataclass(frozen=True)
class Command:
    """How a server is started."""

    arguments: Sequence[str]
    """The program and its arguments, with ``HOST`` and ``PORT`` where the address belongs. It must end when its
    standard input closes."""
    serves: str
    """What it serves, for messages."""
    ready: re.Pattern[str]
    """Found in its output once it answers. The first group is its URL."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process; a value may be ``HOST``."""
    secret: str = ""
    """Removed from its output: programs print the settings with which they start."""

    def at(self, host: str) -> Command:
        """The command with ``HOST`` and ``PORT`` filled in. The port is one that is free now."""
        filled = {HOST: host}
        if PORT in self.arguments:
            with socket.socket() as probe:
                probe.bind((host, 0))
                filled[PORT] = str(probe.getsockname()[1])
        return replace(
            self,
            arguments=tuple(filled.get(each, each) for each in self.arguments),
            environment={name: filled.get(value, value) for name, value in self.environment.items()},
        )


StartChild = Callable[[Command], Awaitable[ServerProcess]]
"""Starts a server and returns when it answers. If it ends before, ``RolloutFailed`` has its last output."""


class ChildServer:
    """A server process on this machine that only this process can talk to.

    Its standard input is a pipe that only this process holds open. When this process ends, for whatever reason, the
    pipe closes and the server stops. The server runs in a separate session, so that Ctrl-C reaches only this process.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, command: Command, echo: Callable[[str], object] | None = None
    ) -> None:
        self.url = ""
        self._echo = echo
        self._process = process
        self._command = command
        self._output = ""
        self._first_error = ""
        self._ready = asyncio.Event()
        self._is_group_ended = False
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, command: Command, *, host: str = "127.0.0.1", echo: Callable[[str], object] | None = None
    ) -> ChildServer:
        """Return when the server answers. If it ends before, raise ``RolloutFailed`` with its last output.

        ``echo`` is called with everything that it prints.
        """
        command = command.at(host)
        process = await asyncio.create_subprocess_exec(
            *command.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_own_environment() | dict(command.environment),
            start_new_session=True,
        )
        child = cls(process, command, echo)
        try:
            await named_wait(
                child._until_ready(), child._describe_start, hard_limit_s=ENGINE_START_LIMIT_S, kind="engine_start"
            )
        except BaseException:
            await child.stop()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"process {self.pid}"

    @property
    def last_lines(self) -> str:
        """The end of its output. The first error stands before it: servers print long tracebacks of what follows."""
        output = self._output.strip() or "(no output)"
        return output if self._first_error in output else f"the first error: {self._first_error}\n...\n{output}"

    async def wait(self) -> str:
        """Wait until it has ended, and return a description of how."""
        code = await self._exit_status()
        self._end_group()
        await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
        if code < 0:
            return f"{self.name} was killed by {signal_name(-code)}"
        return f"{self.name} ended with exit status {code}"

    async def _exit_status(self) -> int:
        # asyncio's wait() also waits for the pipes, which the processes that it started may hold open.
        while (code := self._process.returncode) is None:  # noqa: ASYNC110  the event loop sets it
            await asyncio.sleep(_LOOK_S)
        return code

    def _end_group(self) -> None:
        """End the processes that it started. If it was killed, it could not do so itself."""
        if not self._is_group_ended:  # only once: the system may use the id again
            self._is_group_ended = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End it with SIGTERM, and with SIGKILL if that takes too long or the caller is cancelled."""
        try:
            if self._process.returncode is None:
                self._process.terminate()
                try:
                    await asyncio.wait_for(self._exit_status(), _STOP_LIMIT_S)
                except TimeoutError:
                    self.kill()
            await self.wait()
        except BaseException:
            self._end_group()  # no other code ends these processes
            raise

    async def _until_ready(self) -> None:
        ready, ended = asyncio.create_task(self._ready.wait()), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.is_set():
                raise RolloutFailed(
                    f"the engine's {ended.result()} before it served {self._command.serves}; its output:\n"
                    f"{self.last_lines}"
                )
        finally:
            ready.cancel()
            ended.cancel()

    def _describe_start(self) -> str:
        last = self.last_lines.splitlines()[-1]
        return f"the engine's process {self.pid} loads {self._command.serves}; its last output: {last}"

    async def _read(self) -> None:
        """Read its output to the end; otherwise it would block when the pipe is full."""
        assert self._process.stdout is not None, "its output is a pipe"
        rest = ""
        while chunk := await self._process.stdout.read(2**16):
            text, rest = without_secret(rest + chunk.decode(errors="replace"), self._command.secret)
            self._take(text)
        self._take(rest)

    def _take(self, text: str) -> None:
        if self._echo is not None and text:
            self._echo(text)
        if not self._first_error and (error := _ERROR.search(text)):
            self._first_error = error[0].strip()
        self._output = (self._output + text)[-_TAIL_CHARACTERS:]
        found = self._command.ready.search(self._output)
        if found and not self.url:
            self.url = found[1]
            self._first_error = ""  # it serves in spite of it
            self._ready.set()


def without_secret(text: str, secret: str) -> tuple[str, str]:
    """The text with stars instead of the secret. Its end is returned separately if the secret may begin there."""
    if not secret:
        return text, ""
    text = text.replace(secret, "***")
    longest = min(len(secret) - 1, len(text))
    count = next((count for count in range(longest, 0, -1) if text.endswith(secret[:count])), 0)
    return text[: len(text) - count], text[len(text) - count :]


_OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")


def _own_environment() -> dict[str, str]:
    """This process's environment, without what makes it a rank of torchrun: the child is none."""
    return {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)}
