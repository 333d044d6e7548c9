"""A worker process, seen from the process that trains."""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from headwater.core.processes import signal_name
from headwater.core.records import Score
from headwater.rewards.functions import Failure
from headwater.rewards.worker import RUNNING, Frames, Message, frame
from headwater.sandbox.inside.family import kill_family

_END_LIMIT_S = 1.0
_READ_BYTES = 2**18
_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from headwater.rewards.worker import main
main(*map(int, sys.argv[2:5]), is_async=sys.argv[5] == "async")
"""

Reply = list[Score] | Failure


@dataclass(eq=False, slots=True)
class Call:
    """One call of a function, from its request to its reply."""

    id: int
    key: str
    """The function."""
    arguments: bytes
    count: int | None
    timeout_s: float
    reply: asyncio.Future[Reply]
    deadline: float = math.inf
    """When the call has taken too long; known once it runs."""
    is_cancelled: bool = False
    """Whether its worker was told to cancel it."""

    def settle(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


@dataclass(eq=False)
class WorkerProcess:
    """This process's side of a worker."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    lifeline: int
    """The worker is killed when this descriptor closes."""
    shared: mmap.mmap
    """Where it writes the id of the call that it runs."""
    is_async: bool
    calls: dict[int, Call] = field(default_factory=dict)
    """Sent and not answered, oldest first. A worker for plain functions runs them in this order."""
    loaded: dict[str, bool] = field(default_factory=dict)
    """Functions that it was told to load, and whether it has done so."""
    load_deadlines: dict[str, float] = field(default_factory=dict)
    """When the functions that it is loading have taken too long."""
    frames: Frames = field(default_factory=Frames)
    unsent: bytearray = field(default_factory=bytearray)
    is_reserved: bool = False
    """It has the calls of a worker that died, and gets no others."""
    watch: asyncio.TimerHandle | None = None
    """Looks at the deadlines of its calls."""

    @classmethod
    def start(cls, *, is_async: bool) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        memory = tempfile.TemporaryFile()  # noqa: SIM115  closed below
        memory.write(RUNNING.pack(-1))
        memory.flush()
        shared = mmap.mmap(memory.fileno(), RUNNING.size)
        descriptors = (theirs.fileno(), watched, memory.fileno())
        path = json.dumps([each or os.getcwd() for each in sys.path])
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START, path, *map(str, descriptors), "async" if is_async else "plain"],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # a group that can be killed as a whole; Ctrl-C does not reach it
            )
        except OSError:
            ours.close()
            os.close(lifeline)
            raise
        finally:
            theirs.close()
            memory.close()
            os.close(watched)
        ours.setblocking(False)
        return cls(process, ours, lifeline, shared, is_async)

    def running(self) -> list[Call]:
        """Calls whose time counts. Of plain ones it is that of the oldest: with one that takes long, its result is sent
        before the next one begins. No plain call begins before all functions are loaded."""
        if self.is_async:
            return [each for each in self.calls.values() if self.loaded[each.key]]
        return list(self.calls.values())[:1] if all(self.loaded.values()) else []

    def culprits(self) -> list[Call]:
        """The call that a worker for plain functions was running when it was ended, or else its oldest one."""
        (number,) = RUNNING.unpack_from(self.shared, 0)
        call = self.calls.get(number) or next(iter(self.calls.values()), None)
        return [] if call is None else [call]

    def attach(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[WorkerProcess], None]) -> None:
        """Have ``on_message`` called by ``loop`` when something has arrived."""
        self.watch = None  # of an event loop that has ended
        self.load_deadlines.clear()
        loop.add_reader(self.connection, on_message, self)
        if self.unsent:
            loop.add_writer(self.connection, self._write, loop)

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.connection)
        loop.remove_writer(self.connection)

    def post(self, messages: list[Message], loop: asyncio.AbstractEventLoop | None) -> None:
        """Send messages, as far as the connection takes them. ``loop`` sends the rest."""
        is_first = not self.unsent
        self.unsent += frame(messages)
        if is_first:
            self._write(loop)

    def _write(self, loop: asyncio.AbstractEventLoop | None) -> None:
        with suppress(BlockingIOError, ConnectionError):  # a lost connection is noticed by reading
            del self.unsent[: self.connection.send(self.unsent)]
        if loop is None:
            return
        if self.unsent:
            loop.add_writer(self.connection, self._write, loop)
        else:
            loop.remove_writer(self.connection)

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; None if the worker has ended."""
        try:
            received = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        return list(self.frames.add(received)) if received else None

    def end(self) -> str:
        """Kill it with its descendants and its process group. Returns how it ended: if it had already, that stays."""
        if self.watch is not None:
            self.watch.cancel()
        if self.process.returncode is None:  # otherwise its number may belong to another process
            kill_family(self.process.pid)
        self.connection.close()
        os.close(self.lifeline)
        try:
            code = self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:  # the system has not ended it yet; it cannot run any more
            return "was killed"
        if code >= 0:
            return f"ended with exit status {code}"
        hint = "; the system may have killed it for lack of memory" if -code == signal.SIGKILL else ""
        return f"was ended by {signal_name(-code)}{hint}"


def read_reply(content: bytes) -> Reply:
    """The result of a call, as the worker sent it."""
    try:
        reply: Reply = pickle.loads(content)
    except Exception as error:  # noqa: BLE001  unpickling calls code of the values
        return Failure("bad_value", f"returned values that cannot be read here: {error}")
    return reply
