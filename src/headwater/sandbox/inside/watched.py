"""A cell as its zygote sees it: enforces its limits and reports how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from headwater.sandbox.inside import frames
from headwater.sandbox.inside.confine import Bounds
from headwater.sandbox.inside.family import contents, family

GO, STOP, INTERRUPT = b"g", b"s", b"i"
"""What the owner may ask for. A session runs between go and stop."""
_SHORTEST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.025
_VIRTUAL_FACTOR = 4
"""Shared memory that a program has let go of is in no process's count, but its addresses are limited to this many
times the memory limit."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_HAS_PROC = os.path.isdir("/proc/self")
_MEMORY_LINES = (b"RssAnon:", b"RssShmem:", b"VmSwap:")


class WatchedCell:
    """One cell, from its fork to its report."""

    def __init__(self, process: int, bounds: Bounds, meter: Meter, link: int, is_running: bool) -> None:
        self.process = process
        self.link = link
        """The connection to the owner."""
        self.handle = os.pidfd_open(process) if hasattr(os, "pidfd_open") else -1
        """A descriptor that becomes readable when the process ends; -1 where the system has none."""
        self._bounds = bounds
        self._meter = meter
        self._is_running = is_running
        self._began = time.monotonic()
        self._looks_at = self._began + _SHORTEST_LOOK_S
        self._cpu_before_s = 0.0
        self._limit: tuple[str, str] | None = None

    def until_look_s(self) -> float | None:
        """Seconds until ``look`` should be called; None if there is nothing to see."""
        return max(0.0, self._looks_at - time.monotonic()) if self._is_running else None

    def look(self) -> None:
        """End the cell if it has exceeded a limit."""
        now = time.monotonic()
        if not self._is_running or now < self._looks_at:
            return
        age_s = now - self._began
        self._looks_at = now + min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, age_s / 4))
        bounds, usage = self._bounds, self._meter.read(self.process)
        if usage.memory_bytes > bounds.memory_bytes or usage.virtual_bytes > _VIRTUAL_FACTOR * bounds.memory_bytes:
            self._break("out_of_memory", f"more than {bounds.memory_bytes >> 20} MiB of memory")
        elif usage.cpu_s - self._cpu_before_s > bounds.cpu_s:
            self._break("timed_out", f"more than {bounds.cpu_s:g} s of processor time")
        elif age_s > bounds.timeout_s:
            self._break("timed_out", f"more than {bounds.timeout_s:g} s")
        elif usage.num_tasks > bounds.max_processes:
            self._break("killed", f"more than {bounds.max_processes} processes and threads")

    def _break(self, status: str, detail: str) -> None:
        self._limit = (status, detail)
        self.kill()

    def obey(self) -> bool:
        """Do what the owner asks for. An owner that has left wants the cell to end; then return false."""
        try:
            wishes = os.read(self.link, 64)
        except OSError:
            wishes = b""
        if not wishes:
            self._is_running = False
            self.kill()
            return False
        for wish in (wishes[place : place + 1] for place in range(len(wishes))):
            if wish == GO:
                self._send(signal.SIGCONT)
                self._began = time.monotonic()
                self._looks_at = self._began + _SHORTEST_LOOK_S
                self._cpu_before_s = self._meter.read(self.process).cpu_s
                self._is_running = True
            elif wish == STOP:
                self._is_running = False
                self._send(signal.SIGSTOP)
            elif wish == INTERRUPT:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.process, signal.SIGINT)
        return True

    def kill(self) -> None:
        """Kill all processes of the cell. Where it has its own process namespace, the first one's end is enough."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for process in family(self.process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)

    def report(self, exit_code: int) -> None:
        """Tell the owner how the cell ended, and forget it."""
        status, detail = self._limit or ("", "")
        message = {"exit_code": None if self._limit else exit_code, "status": status, "detail": detail}
        with contextlib.suppress(OSError):  # the owner may have left
            frames.write(self.link, message | {"seconds": time.monotonic() - self._began})
        os.close(self.link)
        if self.handle >= 0:
            os.close(self.handle)


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


def _memory(process: int) -> tuple[int, int]:
    """Bytes of memory that no file backs, and bytes of addresses."""
    memory_kib = virtual_kib = 0
    for line in contents(f"/proc/{process}/status").splitlines():
        if line.startswith(_MEMORY_LINES):
            memory_kib += int(line.split()[1])
        elif line.startswith(b"VmSize:"):
            virtual_kib = int(line.split()[1])
    return memory_kib * 1024, virtual_kib * 1024


def _work(process: int) -> tuple[float, int]:
    """Processor time, including that of children that have ended, and the number of threads."""
    fields = contents(f"/proc/{process}/stat").rpartition(b")")[2].split()
    return sum(int(each) for each in fields[11:15]) / _TICKS_PER_S, int(fields[17])
