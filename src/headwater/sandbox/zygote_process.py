"""A zygote as its owner sees it: a process that makes cells, and the connection to one cell."""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import Any

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.inside import frames
from headwater.sandbox.launch import Kind, make_launch

_START_LIMIT_S = 60.0
_END_LIMIT_S = 10.0


class ZygoteLost(Exception):
    """The zygote has ended or does not answer; the message has what it wrote before."""


class CellLost(Exception):
    """A cell has ended without a report, or reported that it could not be made."""


class ZygoteProcess:
    """Starts a zygote and waits until it is ready."""

    def __init__(self, kind: Kind, config: SandboxConfig) -> None:
        self.kind = kind
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        alive = os.pidfd_open(self.owner) if hasattr(os, "pidfd_open") else -1
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        launch = make_launch(kind, config, theirs.fileno(), alive)
        try:
            self._process = subprocess.Popen(
                launch.command,
                pass_fds=[each for each in (theirs.fileno(), alive) if each >= 0],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=launch.environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            self._log.close()
            raise ZygoteLost(f"cannot start {launch.command[0]}: {error.strerror}") from error
        finally:
            theirs.close()
            if alive >= 0:
                os.close(alive)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        self._control.settimeout(_START_LIMIT_S)
        try:
            message = read_frame(self._control)
        except (OSError, frames.BrokenFrame) as error:
            message = {"error": str(error)}
        if message is None or not message.get("ready"):
            self.close()
            raise ZygoteLost(self._complaint or "it ended without a message")

    @property
    def is_alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def make_cell(self) -> CellConnection:
        """Ask for a cell and return the connection to it."""
        ours, theirs = socket.socketpair()
        descriptor = array.array("i", [theirs.fileno()])
        try:
            with self._lock:
                self._control.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
        except OSError as error:
            ours.close()
            raise ZygoteLost(str(error)) from error
        finally:
            theirs.close()
        return CellConnection(ours)

    def close(self) -> None:
        """End the zygote and with it all its cells. In a forked process, only forget it."""
        self._control.close()
        if self.owner != os.getpid():
            return
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._complaint = self._last_words()
        self._log.close()

    def _last_words(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


class CellConnection:
    """Sends programs to one cell. Closing it ends everything that runs in the cell."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: dict[str, Any], limit_s: float) -> None:
        self._connection.settimeout(limit_s)
        try:
            self._connection.sendall(frames.encode(message))
        except OSError as error:
            raise CellLost(f"the cell has ended: {error}") from error

    def receive(self, limit_s: float) -> dict[str, Any]:
        self._connection.settimeout(limit_s)
        try:
            report = read_frame(self._connection)
        except (OSError, frames.BrokenFrame) as error:
            raise CellLost(f"the cell gave no report: {error}") from error
        if report is None:
            raise CellLost("the cell ended without a report")
        if "error" in report:
            raise CellLost(str(report["error"]))
        return report

    def close(self) -> None:
        """End the cell. Another thread that waits for its report gets ``CellLost``."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def read_frame(connection: socket.socket) -> dict[str, Any] | None:
    """Read one message; None at the end of the connection. The time-out of the socket limits the whole message."""
    limit_s = connection.gettimeout()
    deadline = time.monotonic() + (limit_s if limit_s is not None else float("inf"))
    reader = frames.Reader()
    while True:
        piece = connection.recv(reader.wants)
        if not piece:
            if reader.is_empty:
                return None
            raise frames.BrokenFrame("the other side ended in the middle of a message")
        if (message := reader.feed(piece)) is not None:
            return message
        if limit_s is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
