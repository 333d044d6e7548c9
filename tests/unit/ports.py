"""Ports for servers that tests start a moment later."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_FIRST_PORT = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()


def free_port() -> int:
    """A free port that no other process gets by chance before the caller's server listens at it.

    It is below the ports that the system gives to connections and to servers that ask for any port. Those are taken
    and freed all the time on a busy machine. Each test process has ports of its own, and gives each of them only once.
    """
    first_of_system = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 0
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    candidates = [port for port in range(_FIRST_PORT + number, first_of_system, num_workers) if port not in _given]
    for port in random.SystemRandom().sample(candidates, 50) if len(candidates) > 1000 else [0]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.add(port)
            return int(probe.getsockname()[1])
    raise AssertionError("50 ports are in use")
