"""What the processes of one sandbox use, read from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HAS_PROC = os.path.isdir("/proc/self")
_MEMORY_LINES = (b"RssAnon:", b"RssShmem:", b"VmSwap:")


@dataclass(frozen=True)
class Usage:
    """The sum over all processes of a sandbox."""

    memory_bytes: int
    virtual_bytes: int
    cpu_s: float
    num_tasks: int


class Meter:
    """Reads what the processes below this one use.

    Every process begins as a copy of this one. The pages that it shares with this one are not counted: ``read``
    subtracts what this process had when the meter was made.
    """

    def __init__(self, is_alone: bool) -> None:
        self._is_alone = is_alone
        """True if all other processes in /proc belong to the sandbox."""
        self._own_memory, self._own_virtual = _memory(os.getpid()) if _HAS_PROC else (0, 0)

    def read(self) -> Usage:
        memory_bytes = virtual_bytes = num_tasks = 0
        cpu_s = 0.0
        for process in self.processes():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may end while it is read
                memory, virtual = _memory(process)
                seconds, tasks = _work(process)
                memory_bytes += max(0, memory - self._own_memory)
                virtual_bytes += max(0, virtual - self._own_virtual)
                cpu_s += seconds
                num_tasks += tasks
        return Usage(memory_bytes, virtual_bytes, cpu_s, num_tasks)

    def processes(self) -> list[int]:
        if self._is_alone:
            own = os.getpid()
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]
        found: list[int] = []
        waiting = [os.getpid()]
        while waiting:
            children = _children(waiting.pop())
            found += children
            waiting += children
        return found


def _memory(process: int) -> tuple[int, int]:
    """Bytes of memory that no file backs, and bytes of addresses."""
    memory_kib = virtual_kib = 0
    for line in _contents(f"/proc/{process}/status").splitlines():
        if line.startswith(_MEMORY_LINES):
            memory_kib += int(line.split()[1])
        elif line.startswith(b"VmSize:"):
            virtual_kib = int(line.split()[1])
    return memory_kib * 1024, virtual_kib * 1024


def virtual_bytes(process: int) -> int:
    """Bytes of addresses of a process; 0 where that cannot be read."""
    try:
        return _memory(process)[1]
    except OSError:
        return 0


def _work(process: int) -> tuple[float, int]:
    """Processor time, including that of children that have ended, and the number of threads."""
    fields = _contents(f"/proc/{process}/stat").rpartition(b")")[2].split()
    return sum(int(each) for each in fields[11:15]) / _TICKS_PER_S, int(fields[17])


def _children(process: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            found += [int(each) for each in _contents(f"/proc/{process}/task/{task}/children").split()]
    return found


def _contents(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
