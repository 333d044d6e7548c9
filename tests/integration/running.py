"""A ``headwater serve`` that a test starts, stops and starts again at the same address."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.error
import urllib.request

import forked
from command import ROOT
from ports import free_port

_LIMIT_S = 300.0


class Running:
    """A server at a fixed address. ``start`` returns at once; ``ready`` waits until it answers."""

    def __init__(self, *arguments: str, model: str = "tiny:qwen3") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = (model, *arguments)
        self._process: forked.Forked | None = None

    def start(self) -> Running:
        command = ["-m", "headwater", "serve", *self._arguments, "--port", self.port]
        self._process = forked.popen(*command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def ready(self) -> Running:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=60):
                    return self
            except (urllib.error.URLError, OSError):
                assert self._process is not None and self._process.poll() is None, "it has ended"  # noqa: PT018
                assert time.monotonic() < deadline, "it does not answer"
                time.sleep(0.1)

    def signal(self, number: int) -> None:
        assert self._process is not None, "started"
        self._process.send_signal(number)

    def kill(self) -> None:
        """Also ends a process that was stopped with SIGSTOP."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
