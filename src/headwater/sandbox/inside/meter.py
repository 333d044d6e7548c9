"""What the processes of one cell use, read from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HAS_PROC = os.path.isdir("/proc/self")
_MEMORY_LINES = (b"RssAnon:", b"RssShmem:", b"VmSwap:")


@dataclass(frozen=True)
class Usage:
    """The sum over all processes of a cell."""

    memory_bytes: int
    virtual_bytes: int
    cpu_s: float
    num_tasks: int


class Meter:
    """Reads what a process and its descendants use.

    Every cell begins as a copy of this process. The pages that it shares with this process are not counted: ``read``
    subtracts what this process had when the meter was made.
    """

    def __init__(self) -> None:
        self._own_memory, self.own_virtual_bytes = _memory(os.getpid()) if _HAS_PROC else (0, 0)

    def read(self, root: int) -> Usage:
        memory_bytes = virtual_bytes = num_tasks = 0
        cpu_s = 0.0
        for process in family(root):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may end while it is read
                memory, virtual = _memory(process)
                seconds, tasks = _work(process)
                memory_bytes += max(0, memory - self._own_memory)
                virtual_bytes += max(0, virtual - self.own_virtual_bytes)
                cpu_s += seconds
                num_tasks += tasks
        return Usage(memory_bytes, virtual_bytes, cpu_s, num_tasks)


def family(root: int) -> list[int]:
    """A process and all its descendants."""
    found = [root]
    waiting = [root]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            found += [int(each) for each in _contents(f"/proc/{process}/task/{task}/children").split()]
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


def _work(process: int) -> tuple[float, int]:
    """Processor time, including that of children that have ended, and the number of threads."""
    fields = _contents(f"/proc/{process}/stat").rpartition(b")")[2].split()
    return sum(int(each) for each in fields[11:15]) / _TICKS_PER_S, int(fields[17])


def _contents(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
