"""Python processes for tests, forked from one that has imported torch and transformers already.

    process = forked.popen("-m", "headwater", "serve", "tiny:qwen3", stdout=subprocess.PIPE)

Importing them takes a new process about eight seconds of processor time. What a forked process executes is what
``python`` with these arguments executes. One server (``python forked.py FD``) forks them all, also for the other test
processes of the session. It ends when none of them is connected.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

START_LIMIT_S = 600.0
PRELOADED = (
    "transformers.modeling_utils", "headwater.trainer.loop", "headwater.trainer.rollout_setup",
    "headwater.trainer.summary", "headwater.cluster.torchrun", "headwater.backends.embedded",
    "headwater.backends.native.engine", "headwater.engine.engine", "headwater.serving.listen",
    "transformers.models.qwen3.modeling_qwen3", "pandas", "matplotlib.figure", "matplotlib.backends.backend_agg",
    "headwater.cli.train", "headwater.config.training_checks", "headwater.config.explain", "headwater.config.notices",
    "headwater.learner.snapshot", "headwater.workflows.rlvr", "headwater.rewards.managers.naive",
)  # fmt: skip
"""What a training run imports. pyarrow imports pandas when it first converts a list."""
ADDRESS = f"\0headwater-forked-{os.environ.get('HEADWATER_TEST_SESSION') or uuid.uuid4().hex}"
"""Where the server listens: an abstract socket of this session, which vanishes with the server."""
_MAX_MESSAGE_BYTES = 2**18


class Forked:
    """A forked process, with the part of the interface of ``subprocess.Popen`` that tests use."""

    def __init__(self, arguments: list[str], pid: int, pipes: list[IO[Any] | None]) -> None:
        self.args = arguments
        self.pid = pid
        self.stdin, self.stdout, self.stderr = pipes
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """What is left of the output and of the errors."""
        if self.stdin is not None:
            self.stdin.close()
        found: dict[int, Any] = {}
        readers = [
            threading.Thread(target=lambda place=place, pipe=pipe: found.update({place: pipe.read()}), daemon=True)
            for place, pipe in enumerate((self.stdout, self.stderr))
            if pipe is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return found.get(0), found.get(1)


class _Server:
    """A connection to the process that forks, and the thread that learns from it which processes have ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        """The server, if this process has started it."""
        self._socket = self._connected()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._processes: dict[int, Forked] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _connected(self) -> socket.socket:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(START_LIMIT_S)
            try:
                connection.connect(ADDRESS)
                if connection.recv(_MAX_MESSAGE_BYTES):
                    connection.settimeout(None)
                    return connection
            except ConnectionRefusedError:
                assert self.process is None or not self.process.poll(), "the server failed"
                self._start_server()
            except ConnectionResetError:
                pass  # the server was about to end
            connection.close()
        raise AssertionError("no server forks processes")

    def _start_server(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(ADDRESS)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return  # another process of the session was faster
            listener.listen(64)
            command = [sys.executable, __file__, str(listener.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment)

    def start(self, request: Mapping[str, Any], files: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            with self._changed:
                assert self._changed.wait_for(lambda: self._started, START_LIMIT_S), "the server forks nothing"
                return self._started.pop()

    def add(self, process: Forked) -> None:
        with self._changed:
            if process.pid in self._ended:
                process.end(self._ended.pop(process.pid))
            else:
                self._processes[process.pid] = process

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self.process is not None and "PYTEST_XDIST_WORKER" not in os.environ:  # otherwise, others may still use it
            self.process.wait(60)

    def _listen(self) -> None:
        while message := self._receive():
            pid, code = json.loads(message)
            with self._changed:
                if code is None:
                    self._started.append(pid)
                elif pid in self._processes:
                    self._processes.pop(pid).end(code)
                else:
                    self._ended[pid] = code
                self._changed.notify_all()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_MAX_MESSAGE_BYTES)
        except OSError:  # closed
            return b""


_server: _Server | None = None
_making = threading.Lock()


def _the_server() -> _Server:
    global _server
    with _making:
        if _server is None:
            _server = _Server()
        return _server


def popen(
    *arguments: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    text: bool = True,
) -> Forked:
    """Start ``python *arguments``: ``-m module ...``, ``-c code ...`` or a script, like ``subprocess.Popen``."""
    server = _the_server()
    ours: list[IO[Any] | None] = []
    theirs: list[int] = []
    for place, wanted in enumerate((stdin, stdout, stderr)):
        pipe: IO[Any] | None = None
        if wanted == subprocess.PIPE:
            reading, writing = os.pipe()
            keep, give, mode = (writing, reading, "w") if place == 0 else (reading, writing, "r")
            pipe = os.fdopen(keep, mode if text else f"{mode}b")
        elif wanted == subprocess.STDOUT:
            give = os.dup(theirs[1])
        elif wanted == subprocess.DEVNULL:
            give = os.open(os.devnull, os.O_RDWR)
        else:
            give = os.dup(place if wanted is None else wanted)
        ours.append(pipe)
        theirs.append(give)
    words = [str(each) for each in arguments]
    environment = dict(os.environ if env is None else env)
    request = {"arguments": words, "cwd": str(cwd or Path.cwd()), "environment": environment}
    try:
        process = Forked(words, server.start(request, theirs), ours)
    finally:
        for each in theirs:
            os.close(each)
    server.add(process)
    return process


def run(*arguments: object, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with ``capture_output`` and ``text``."""
    process = popen(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        output, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(60), output, errors)


def close() -> None:
    """Disconnect from the server, which ends with its last connection. Processes that it has forked are not ended."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


# The server


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for every request, in which this returns the request; None when the tests have ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    clients: list[socket.socket] = []
    owners: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, reading, *clients], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _report(owners)
        if listener in ready:
            client = listener.accept()[0]
            clients.append(client)
            _tell(client, "hello")
        for client in [each for each in clients if each in ready]:
            try:
                message, files, _, _ = socket.recv_fds(client, _MAX_MESSAGE_BYTES, 3)
            except ConnectionResetError:
                message = b""
            if not message:
                clients.remove(client)
                client.close()
                if not clients:
                    return None
                continue
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (reading, writing):
                    os.close(each)
                for connection in (listener, *clients):
                    connection.close()
                return json.loads(message), files
            for each in files:
                os.close(each)
            owners[pid] = client
            _tell(client, (pid, None))


def _report(owners: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _tell(owners.pop(pid), (pid, os.waitstatus_to_exitcode(status)))


def _tell(client: socket.socket, message: object) -> None:
    with contextlib.suppress(OSError):  # it has left
        client.send(json.dumps(message).encode())


def _execute(request: dict[str, Any], files: list[int]) -> None:
    for place, each in enumerate(files):
        os.dup2(each, place)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    first, *rest = request["arguments"]
    sys.path.insert(0, request["cwd"] if first.startswith("-") else str(Path(first).parent))
    sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(":") if each and each not in sys.path]
    if first == "-m" and rest[0].startswith("headwater"):
        from headwater.cli.main import main

        sys.argv = rest
        sys.exit(main(rest[1:]))
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    # What is imported stays. A garbage collection in a forked process would read, and thereby copy, all of it.
    gc.collect()
    gc.freeze()
    # Some extension modules print warnings at exit about objects that still exist.
    atexit.register(gc.unfreeze)
    if (given := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _execute(*given)
