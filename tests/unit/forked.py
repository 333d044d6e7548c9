"""Python processes for tests, forked from one that has imported torch and transformers already.

    process = forked.popen("-m", "headwater", "serve", "tiny:qwen3", stdout=subprocess.PIPE)

Importing them takes a new process about eight seconds of processor time. What a forked process executes is what
``python`` with these arguments executes. One server (``python forked.py FD``) forks them all; it ends with the tests.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

START_LIMIT_S = 600.0
PRELOADED = (
    "transformers.modeling_utils", "headwater.trainer.loop", "headwater.trainer.rollout_setup",
    "headwater.trainer.summary", "headwater.cluster.torchrun", "headwater.backends.embedded",
    "headwater.backends.native.engine", "headwater.engine.engine", "headwater.serving.listen",
)  # fmt: skip
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
    """The process that forks, and the thread that learns from it which processes have ended."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._processes: dict[int, Forked] = {}
        threading.Thread(target=self._listen, daemon=True).start()

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
        self.process.wait(60)

    def _listen(self) -> None:
        while message := self._socket.recv(_MAX_MESSAGE_BYTES):
            pid, code = json.loads(message)
            with self._changed:
                if code is None:
                    self._started.append(pid)
                elif pid in self._processes:
                    self._processes.pop(pid).end(code)
                else:
                    self._ended[pid] = code
                self._changed.notify_all()


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
    """End the server. Processes that it has forked are not ended."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


# The server


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for every request, in which this returns the request; None when the tests have ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    while True:
        ready, _, _ = select.select([control, reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _report(control)
        if control in ready:
            message, files, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 3)
            if not message:
                return None
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (reading, writing):
                    os.close(each)
                control.close()
                return json.loads(message), files
            for each in files:
                os.close(each)
            control.send(json.dumps((pid, None)).encode())


def _report(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        control.send(json.dumps((pid, os.waitstatus_to_exitcode(status))).encode())


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
    if (given := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _execute(*given)
