"""A reward worker: a process that loads scoring functions by path and calls them. ``pool.py`` is its other side.

Both sides send frames over a socket: the length in four bytes, then a pickled list of messages.

    to the worker      ("load", key, path, settings)          once per function
                       ("call", id, key, arguments, count)    arguments are pickled; count is None, or that of the lists
                       ("cancel", id)                         only for async functions
    from the worker    ("loaded", key, failure or None)
                       ("done", id, pickled scores or failure, seconds)

A worker for plain functions calls them one at a time on its main thread, so signals and event loops work in them as in
a script. It sends the results of short calls together, and writes the id of the call that it runs to memory that it
shares with its parent, who then knows which call to blame if the worker hangs or dies. A worker for async functions
runs them concurrently on one event loop. Neither imports torch.
"""

from __future__ import annotations

import fcntl
import inspect
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from headwater.core.errors import HeadwaterError
from headwater.rewards.functions import Failure, failure_of, read_result
from headwater.rewards.scorers import SCORERS

if TYPE_CHECKING:
    import asyncio

Message = tuple[Any, ...]

_LENGTH = struct.Struct("!I")
RUNNING = struct.Struct("q")
"""The id of the running call, in memory that both processes see; -1 before the first one."""
_READ_BYTES = 2**18
_HOLD_S = 0.005
"""How long results may wait for those of later calls: one message for each would cost more than a short call."""
_F_SETSIG = 10
"""Linux: the signal that a descriptor sends; the module fcntl has no name for it."""
_NICENESS = 5
"""Lower priority than the engine, which then gets about three times as much of a core that they compete for."""
_OOM_SCORE = "500"
"""When memory runs out, the system should end a worker and not the process that trains."""


def frame(messages: list[Message]) -> bytes:
    """Messages as bytes. Raises if something in them cannot be pickled."""
    content = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


class Frames:
    """Collects received bytes and gives the messages in them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, received: bytes) -> Iterator[Message]:
        self._bytes += received
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield from pickle.loads(content)


def main(connection: int, lifeline: int, shared: int, *, is_async: bool) -> None:
    """Serve until the socket closes. ``connection``, ``lifeline`` and ``shared`` are inherited file descriptors."""
    _end_with_parent(lifeline)
    _be_modest()
    running = mmap.mmap(shared, RUNNING.size)
    os.close(shared)
    with socket.socket(fileno=connection) as parent:
        (_AsyncWorker if is_async else _Worker)(parent, running).serve()


def _end_with_parent(lifeline: int) -> None:
    """Have the system kill this process group when the parent's end of a pipe closes, however the parent ends.

    On Linux, this works even if a function never returns and holds the interpreter's lock.
    """
    if sys.platform != "linux":
        threading.Thread(target=_kill_at_end_of, args=(lifeline,), daemon=True).start()
        return
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        is_over = os.read(lifeline, 1) == b""  # the parent may have ended before the pipe was watched
    except BlockingIOError:
        is_over = False
    if is_over:
        os._exit(0)


def _kill_at_end_of(pipe: int) -> None:
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


def _be_modest() -> None:
    os.nice(_NICENESS)
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_OOM_SCORE)
    except OSError:
        pass  # not on this system, or not allowed: the worker works without it


class _Worker:
    """The functions that were loaded, and the connection to the parent."""

    def __init__(self, parent: socket.socket, running: mmap.mmap) -> None:
        self.parent = parent
        self._running = running
        self._results: list[Message] = []
        """Not sent yet."""
        self._functions: dict[str, partial[Any]] = {}
        self._not_loaded: dict[str, Failure] = {}

    def serve(self) -> None:
        frames = Frames()
        while received := self.parent.recv(_READ_BYTES):
            sent_at = time.perf_counter()
            for message in frames.add(received):
                if message[0] == "load":
                    self.load(message)
                    continue
                self._results.append(self._call(message))
                if time.perf_counter() - sent_at > _HOLD_S:
                    self._send_results()
                    sent_at = time.perf_counter()
            self._send_results()

    def _send_results(self) -> None:
        if self._results:
            results, self._results = self._results, []
            self.send(results)

    def load(self, message: Message) -> None:
        """Import a function, and say whether that worked."""
        _, key, path, settings = message
        try:
            self._functions[key] = partial(SCORERS.resolve(path), **settings)
        except HeadwaterError as error:
            self._not_loaded[key] = Failure("not_loaded", f"cannot be loaded by a reward worker: {error}")
        self.send([("loaded", key, self._not_loaded.get(key))])

    def send(self, messages: list[Message]) -> None:
        self.parent.sendall(frame(messages))

    @staticmethod
    def done(call: int, result: Any, seconds: float) -> Message:
        """The message with scores or a failure. A score whose other values cannot be sent is a failure, too."""
        try:
            content = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  pickling calls code of the values
            failure = Failure("bad_value", f"returned values that cannot be sent to another process: {error}")
            content = pickle.dumps(failure, pickle.HIGHEST_PROTOCOL)
        return ("done", call, content, seconds)

    def _call(self, message: Message) -> Message:
        _, call, key, arguments, count = message
        if key in self._not_loaded:  # the call was sent before the parent knew
            return self.done(call, self._not_loaded[key], 0.0)
        RUNNING.pack_into(self._running, 0, call)
        function = self._functions[key]
        if "asyncio" in sys.modules:
            _have_event_loop()
        began = time.perf_counter()
        result: Any
        try:
            returned = function(**pickle.loads(arguments))
            if inspect.isawaitable(returned):
                returned = _have_event_loop().run_until_complete(_awaited(returned))
            result = read_result(returned, count)
        except BaseException as error:  # noqa: BLE001  also SystemExit: the function must not end its worker
            result = failure_of(error, function.func)
        return self.done(call, result, time.perf_counter() - began)


class _AsyncWorker(_Worker):
    """Runs async functions concurrently. How many run at once, and for how long, is the parent's decision."""

    def serve(self) -> None:
        import asyncio

        asyncio.run(self._serve())

    async def _serve(self) -> None:
        import asyncio

        loop, frames, tasks = asyncio.get_running_loop(), Frames(), dict[int, asyncio.Task[None]]()
        is_over = asyncio.Event()

        def ended(call: int, task: asyncio.Task[None]) -> None:
            del tasks[call]
            if task.cancelled():  # before it began
                self.send([self.done(call, Failure("cancelled", "was cancelled"), 0.0)])

        def read() -> None:
            received = self.parent.recv(_READ_BYTES)
            if not received:
                is_over.set()
            for message in frames.add(received):
                if message[0] == "load":
                    self.load(message)
                elif message[0] == "call":
                    tasks[message[1]] = task = asyncio.create_task(self._acall(message))
                    task.add_done_callback(partial(ended, message[1]))
                elif message[1] in tasks:
                    tasks[message[1]].cancel()

        loop.add_reader(self.parent.fileno(), read)
        await is_over.wait()

    async def _acall(self, message: Message) -> None:
        import asyncio

        _, call, key, arguments, count = message
        if key in self._not_loaded:
            self.send([self.done(call, self._not_loaded[key], 0.0)])
            return
        function, began = self._functions[key], time.perf_counter()
        result: Any
        try:
            result = read_result(await function(**pickle.loads(arguments)), count)
        except asyncio.CancelledError:
            result = Failure("cancelled", "was cancelled")
        except BaseException as error:  # noqa: BLE001  also SystemExit: the function must not end its worker
            result = failure_of(error, function.func)
        self.send([self.done(call, result, time.perf_counter() - began)])


def _have_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread, for functions that call ``get_event_loop().run_until_complete``."""
    import asyncio

    try:
        loop = asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = None
    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    return loop


async def _awaited(value: Any) -> Any:
    return await value
