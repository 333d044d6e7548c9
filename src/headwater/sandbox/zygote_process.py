"""A zygote as its owner sees it: a process that makes cells."""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from dataclasses import asdict

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.cell_link import CellLink
from headwater.sandbox.inside.confine import Bounds
from headwater.sandbox.inside.zygote import READY
from headwater.sandbox.launch import Kind, make_launch

_START_LIMIT_S = 60.0
_END_LIMIT_S = 10.0


class ZygoteLost(Exception):
    """The zygote has ended or cannot be started; the message has what it wrote before."""


class ZygoteProcess:
    """Starts a zygote and waits until it is ready."""

    def __init__(self, kind: Kind, config: SandboxConfig) -> None:
        self.kind = kind
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._last_words = ""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
            is_ready = self._control.recv(len(READY)) == READY
        except OSError:
            is_ready = False
        if not is_ready:
            self.close()
            raise ZygoteLost(self._last_words or "it ended without a message")

    @property
    def is_alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def make_cell(self, kind: str, bounds: Bounds, scratch_bytes: int, scratch: str | None = None) -> CellLink:
        """Ask for a cell and return the connection to it."""
        link, theirs = CellLink.make(bounds.max_output_bytes)
        request = {"kind": kind, "bounds": asdict(bounds), "scratch_bytes": scratch_bytes, "scratch": scratch}
        descriptors = array.array("i", theirs)
        try:
            with self._lock:
                self._control.sendmsg(
                    [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                )
        except OSError as error:
            link.close()
            raise ZygoteLost(str(error)) from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return link

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
        if not self._log.closed:
            self._log.seek(0)
            lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
            self._last_words = lines[-1] if lines else ""
            self._log.close()
