"""A ``headwater`` command that listens, started by a test."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from typing import Any

import forked
from command import start_headwater

LIMIT_S = 300.0


class Process:
    """Starts the command and returns when it serves."""

    def __init__(self, *arguments: object) -> None:
        self._process: forked.Forked = start_headwater(*arguments)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("serving "):
            raise AssertionError(f"{line}{self._process.communicate(timeout=LIMIT_S)}")
        self.url = line.split(" at ")[1].strip()
        self.port = int(self.url.rpartition(":")[2])
        # Nobody reads these, and a full pipe would stop the process.
        for pipe in (self._process.stdout, self._process.stderr):
            threading.Thread(target=pipe.read, daemon=True).start()

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=LIMIT_S) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.send(number)
        self._process.wait(LIMIT_S)
