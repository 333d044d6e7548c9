"""Supervises the processes of one program: collects output, enforces limits, and says how the program ended."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import time
from dataclasses import dataclass

from headwater.sandbox.inside.confine import Bounds
from headwater.sandbox.inside.meter import Meter, Usage

_SHORTEST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.025
_FLOOD_FACTOR = 4
"""A program may write this many times the output that is kept."""
_VIRTUAL_FACTOR = 4
"""Shared memory that a program has let go of is in no process's count, but its addresses are limited to this many
times the memory limit."""
_INTERRUPT_GRACE_S = 1.0
_OUT_OF_MEMORY = re.compile(rb"(?:^|\n)[\w.]*MemoryError\b[^\n]*\n?$")


class OwnerLeft(Exception):
    """The owner has closed the connection: nothing that runs here is wanted any more."""


@dataclass(frozen=True)
class Ending:
    """How a program ended."""

    status: str
    exit_code: int | None
    detail: str = ""


class Output:
    """The two output pipes of a program, and what was read from them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        self._kept = {name: bytearray() for name in self._pipes}
        self._num_bytes = 0
        for reader, _ in self._pipes.values():
            os.set_blocking(reader, False)
        self.is_cut = False

    @property
    def readers(self) -> tuple[int, ...]:
        return tuple(reader for reader, _ in self._pipes.values())

    @property
    def writers(self) -> tuple[int, ...]:
        return tuple(writer for _, writer in self._pipes.values())

    @property
    def is_flood(self) -> bool:
        return self._num_bytes > _FLOOD_FACTOR * self._max_bytes

    def read(self) -> bool:
        """Read what is there, at most as much as makes a flood. Return whether a pipe may have more."""
        more = False
        for name, (reader, _) in self._pipes.items():
            with contextlib.suppress(BlockingIOError):
                piece = os.read(reader, 1 << 16)
                more |= bool(piece)
                self._num_bytes += len(piece)
                kept = self._kept[name]
                room = self._max_bytes - len(kept)
                self.is_cut |= len(piece) > room
                kept += piece[:room]
        return more and not self.is_flood

    def take(self) -> dict[str, str]:
        """What the program wrote since the last time."""
        texts = {name: kept.decode("utf-8", "replace") for name, kept in self._kept.items()}
        for kept in self._kept.values():
            kept.clear()
        self._num_bytes = 0
        self.is_cut = False
        return texts

    def ends_with_memory_error(self) -> bool:
        return _OUT_OF_MEMORY.search(bytes(self._kept["stderr"][-2000:])) is not None

    def close(self) -> None:
        for pair in self._pipes.values():
            for descriptor in pair:
                os.close(descriptor)


class Supervisor:
    """Watches one program, which is the child ``child`` of this process, and everything that it starts."""

    def __init__(self, child: int, bounds: Bounds, output: Output, meter: Meter, control: int) -> None:
        self._child = child
        self._bounds = bounds
        self._output = output
        self._meter = meter
        self._control = control
        self._exit_code: int | None = None
        self._child_handle = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
        self._cpu_before_s = 0.0
        self.usage = Usage(0, 0, 0.0, 0)

    def wait_for_exit(self) -> Ending:
        """Wait until the program ends or breaks a limit, then end everything that it has started."""
        limit = self._watch(done=None)
        self.end_all()
        return self._ending(limit)

    def wait_for_piece(self, done: int) -> tuple[Ending, bool]:
        """Wait until a session has executed a piece of code. Return its ending and whether the session lives on."""
        self._cpu_before_s = self._cpu_s()
        limit = self._watch(done)
        if limit is not None and limit.status == "timed_out":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGINT)
            if self._watch(done, timeout_s=_INTERRUPT_GRACE_S) is None and self._exit_code is None:
                os.read(done, 64)
                return limit, True
        if limit is not None or self._exit_code is not None:
            self.end_all()
            return self._ending(limit), False
        status = int(os.read(done, 64).split(b"\n")[0] or b"1")
        while self._output.read():
            pass
        return self._ended_by_itself(status), True

    def _watch(self, done: int | None, timeout_s: float | None = None) -> Ending | None:
        """Return None when the program has ended or ``done`` has something to read, else the limit that it broke."""
        began = time.monotonic()
        allowed_s = self._bounds.timeout_s if timeout_s is None else timeout_s
        poll = select.poll()
        for descriptor in (*self._output.readers, self._control, done, self._child_handle):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        looked = began
        while True:
            now = time.monotonic()
            look_s = min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, (now - began) / 4))
            ready = {descriptor for descriptor, _ in poll.poll(1000 * look_s)}
            if self._control in ready:
                raise OwnerLeft
            self._output.read()
            if self._output.is_flood:
                return Ending("too_much_output", None, f"more than {self._kib()} KiB of output")
            if self._has_exited() or (done is not None and done in ready):
                return None
            now = time.monotonic()
            if now - began > allowed_s:
                return Ending("timed_out", None, f"more than {allowed_s:g} s")
            if now - looked >= look_s:
                looked = now
                if broken := self._broken_limit():
                    return broken

    def _kib(self) -> int:
        return _FLOOD_FACTOR * self._bounds.max_output_bytes >> 10

    def _broken_limit(self) -> Ending | None:
        self.usage = usage = self._meter.read()
        bounds = self._bounds
        if usage.memory_bytes > bounds.memory_bytes or usage.virtual_bytes > _VIRTUAL_FACTOR * bounds.memory_bytes:
            return Ending("out_of_memory", None, f"more than {bounds.memory_bytes >> 20} MiB of memory")
        if self._cpu_s() - self._cpu_before_s > bounds.cpu_s:
            return Ending("timed_out", None, f"more than {bounds.cpu_s:g} s of processor time")
        if usage.num_tasks > bounds.max_processes:
            return Ending("killed", None, f"more than {bounds.max_processes} processes and threads")
        return None

    def _cpu_s(self) -> float:
        """Processor time of all processes of the program, also of those that have ended."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self.usage.cpu_s + ended.ru_utime + ended.ru_stime

    def _has_exited(self) -> bool:
        """Collect the processes that have ended; true if the program itself is one of them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    break
                if process == self._child:
                    self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code is not None

    def end_all(self) -> None:
        """Kill all processes of the program and read the rest of its output."""
        self._has_exited()
        kill_all(self._meter)
        while self._output.read():
            pass

    def freeze(self) -> None:
        """Stop all processes until ``thaw``."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        for process in self._meter.processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)

    def _ending(self, limit: Ending | None) -> Ending:
        if limit is not None:
            return limit
        if self._exit_code is None:
            return Ending("killed", None, "the program disappeared")
        if self._output.is_flood:
            return Ending("too_much_output", self._exit_code, f"more than {self._kib()} KiB of output")
        return self._ended_by_itself(self._exit_code)

    def _ended_by_itself(self, exit_code: int) -> Ending:
        if exit_code == 0:
            return Ending("ok", 0)
        if exit_code == -signal.SIGXCPU:
            return Ending("timed_out", exit_code, f"more than {self._bounds.cpu_s:g} s of processor time")
        if exit_code < 0:
            return Ending("killed", exit_code, f"ended by {_signal_name(-exit_code)}")
        if self._output.ends_with_memory_error():
            return Ending("out_of_memory", exit_code, f"more than {self._bounds.memory_bytes >> 20} MiB of memory")
        return Ending("failed", exit_code)


def kill_all(meter: Meter) -> None:
    """Kill all processes that the meter sees, and collect them."""
    while processes := meter.processes():
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
