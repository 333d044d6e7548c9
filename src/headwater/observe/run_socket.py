"""``servers.sock``: where the process of a run takes calls of the same user on the same machine.

    with listening(run.servers_socket) as taken:      # in the process that writes the run
        ...                                           # serve HTTP on it
    answer = call(run.servers_socket, "/servers")     # in another process

Only the user of the run may connect: the mode of the socket is 0600. The run removes it when it ends. One that a killed
run has left refuses connections, and the next process that writes the run replaces it.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MOST_BYTES = 103
"""The longest address of a socket that all systems accept. Linux has 107, macOS has 103."""


class NothingListens(Exception):
    """No process on this machine listens at the socket of a run. ``is_stale`` if there is a socket."""

    def __init__(self, *, is_stale: bool) -> None:
        super().__init__()
        self.is_stale = is_stale


class CallRefused(Exception):
    """The process of the run refuses a call. The message says why."""


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket at ``path``, to which only this user can connect. It is removed at the end.

    The caller is the only one that writes the run (``run_lock.py``), so a socket that is there was left by a process
    that was killed. ``OSError`` if the file system has no sockets.
    """
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            path.unlink(missing_ok=True)
            taken.bind(address)
        path.chmod(0o600)  # no one can connect before this: that needs ``listen``
        taken.listen()
        yield taken
    finally:
        taken.close()
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # the next process that writes the run replaces it
            logger.warning("%s cannot be removed: %s", path, error)


def call(path: Path, call_path: str, body: Mapping[str, Any] | None = None, *, limit_s: float) -> dict[str, Any]:
    """The answer to ``GET``, or to ``POST`` with a body. ``CallRefused`` if the answer is an error."""
    connection = _UnixConnection(path, limit_s)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", call_path, text, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer: dict[str, Any] = json.loads(reply.read())
        if reply.status != http.client.OK:
            raise CallRefused(answer["error"]["message"])
        return answer
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket in a folder."""

    def __init__(self, path: Path, limit_s: float) -> None:
        super().__init__("localhost", timeout=limit_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            with _address(self._path) as address:
                self.sock.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NothingListens(is_stale=isinstance(error, ConnectionRefusedError)) from error


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """A short name of ``path``. The folder of a run may have a longer one than the address of a socket can have."""
    if len(os.fsencode(path)) <= _MOST_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
