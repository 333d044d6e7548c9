"""One writer per run directory: ``writer.lock`` is held by the process that trains the run.

    with RunLock(run.lock_file):
        ...                           # another process that tries the same gets a RunError that names this one

The lock is a POSIX record lock, which the system releases when the process ends, however it ends. It also works between
machines over NFS 4, and over NFS 3 with its lock service. Some network file systems grant the lock to two machines, or
have no locks. Therefore the holder also touches the file every few seconds. A process that finds the lock of another
machine watches the file until it has been silent for ``SILENT_S``, and is refused if it is touched in that time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from headwater.core.disk import disk_full
from headwater.core.errors import RunError
from headwater.core.processes import boot_id, process_start
from headwater.core.waits import wait_until

logger = logging.getLogger(__name__)

BEAT_S = 10.0
SILENT_S = 60.0
"""A holder on another machine that has not touched the file for this long has ended."""

_HELD_BY_ANOTHER = {errno.EACCES, errno.EAGAIN}
_held_here: set[Path] = set()
"""The locks of this process. The system's locks do not keep two threads of one process apart."""


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, as the lock file states it."""

    host: str
    boot: str
    """Identifies the boot of the machine. Containers of one machine have the same."""
    pid: int
    process_start: str | None
    since: float
    """Seconds since the epoch."""
    command: str

    @classmethod
    def here(cls) -> LockHolder:
        pid = os.getpid()
        return cls(socket.gethostname(), boot_id(), pid, process_start(pid), time.time(), " ".join(sys.argv[1:])[:120])

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} (since {since}, with arguments: {self.command})"


def holder_of(path: Path) -> LockHolder | None:
    """The process that holds a lock now; None if it has ended. One on another machine is believed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        holder = RunLock.read(descriptor)
    finally:
        os.close(descriptor)
    if holder is None or (holder.boot == boot_id() and process_start(holder.pid) != holder.process_start):
        return None
    return holder


class RunLock:
    """Held inside a ``with`` block. Entering raises ``RunError`` if another process, or this one, holds the lock."""

    def __init__(self, path: Path, *, beat_s: float = BEAT_S, silent_s: float = SILENT_S) -> None:
        self._path = path
        self._beat_s = beat_s
        self._silent_s = silent_s
        self._descriptor = -1
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="headwater-lock", daemon=True)

    def __enter__(self) -> RunLock:
        path = self._path.resolve()
        if path in _held_here:
            raise self._refusal("this process")
        watched = self._watch_other_machine()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            if (holder := self.read(self._descriptor)) != watched and holder is not None and holder.boot != boot_id():
                raise self._refusal(str(holder))  # it was faster
            content = json.dumps(asdict(LockHolder.here()), indent=1).encode()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)
        except BaseException as error:
            os.close(self._descriptor)
            if (full := disk_full(error, path, "the lock of the run")) is not None:
                raise full from error
            raise
        _held_here.add(path)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        _held_here.discard(self._path.resolve())
        try:
            # The file stays: removing it would let a process that has opened it lock a file that no one else sees.
            os.ftruncate(self._descriptor, 0)
        finally:
            os.close(self._descriptor)

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self.read(self._descriptor)
            if error.errno in _HELD_BY_ANOTHER:
                raise self._refusal(str(holder or "another process")) from error
            # The file system has no locks. The touched file still keeps other machines out.
            logger.warning("%s cannot be locked (%s); do not resume this run twice at the same time", self._path, error)
            if holder is not None and holder.boot == boot_id() and process_start(holder.pid) == holder.process_start:
                raise self._refusal(str(holder)) from error

    def _watch_other_machine(self) -> LockHolder | None:
        """If the file names a holder on another machine, wait until it has been silent for long enough."""
        holder, touched = self._look()
        if holder is None or holder.boot == boot_id():
            return None  # released, or of this machine, whose locks can be relied on
        began = time.monotonic()
        silent_s = max(0.0, self._now() - touched)

        def is_silent() -> bool:
            if self._look() != (holder, touched):
                raise self._refusal(str(holder))
            return silent_s + time.monotonic() - began >= self._silent_s

        if not is_silent():
            logger.warning("%s: held by %s; watching it for up to %.0f s", self._path, holder, self._silent_s)
        condition = threading.Condition()
        with condition:
            wait_until(
                condition,
                is_silent,
                lambda: f"whether {holder} still writes the run",
                kind="run_lock",
                hard_limit_s=2 * self._silent_s + 60.0,
            )
        return holder

    def _look(self) -> tuple[LockHolder | None, float]:
        """The holder and when the file was touched. Opening the file makes a network file system ask its server."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None, 0.0
        try:
            return self.read(descriptor), os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)

    def _now(self) -> float:
        """The time of the file system, whose clock may differ from this machine's."""
        probe = self._path.with_name(f".{self._path.name}.{socket.gethostname()}.{os.getpid()}")
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    @staticmethod
    def read(descriptor: int) -> LockHolder | None:
        """The holder that the file states; None if it was released, or if the file is being written."""
        try:
            return LockHolder(**json.loads(os.pread(descriptor, 1 << 16, 0)))
        except (ValueError, TypeError):
            return None

    def _beat(self) -> None:
        while not self._ending.wait(self._beat_s):
            try:
                os.utime(self._descriptor)
            except OSError as error:
                logger.warning("%s cannot be touched: %s", self._path, error)

    def _refusal(self, holder: str) -> RunError:
        run = self._path.parent
        return RunError(
            f"{run}: another process writes this run: {holder}. A run has one writer: wait until it ends, or stop it; "
            f"`headwater doctor {run}` shows what it does"
        )
