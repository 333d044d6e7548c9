"""The owner's connection to one cell: sends programs, collects output, and hears how they end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import time
from dataclasses import dataclass
from typing import Any

from headwater.core.processes import signal_name
from headwater.sandbox.inside import frames
from headwater.sandbox.inside.watched import GO, INTERRUPT, STOP
from headwater.sandbox.records import Outcome, Status

_GRACE_S = 20.0
"""How much longer than its time limit a cell may take to report. The machine may be busy."""
_INTERRUPT_GRACE_S = 1.0
_FLOOD_FACTOR = 4
"""A program may write this many times the output that is kept."""
_MESSAGE_LIMIT_S = 10.0
_MAX_MESSAGE_BYTES = 1 << 16
"""Longest message of a cell. The code of a session can write to the connection, and must not fill our memory."""
_OUT_OF_MEMORY = re.compile(rb"(?:^|\n)[\w.]*MemoryError\b[^\n]*\n?$")


class CellLost(Exception):
    """A cell has ended without a report."""


class CellNotMade(CellLost):
    """A cell could not be made: no code was run."""


@dataclass(frozen=True)
class _Ending:
    """How a program ended, before its output is added."""

    status: Status | None
    """None: as the exit status says."""
    exit_code: int | None
    detail: str = ""
    seconds: float = 0.0


class CellLink:
    """One cell. It serves one thread at a time; ``close`` may be called by any."""

    @classmethod
    def make(cls, max_output_bytes: int) -> tuple[CellLink, list[int]]:
        """Make a connection; return our side and the four descriptors of the cell's side."""
        data, their_data = socket.socketpair()
        watch, their_watch = socket.socketpair()
        stdout, their_stdout = os.pipe()
        stderr, their_stderr = os.pipe()
        theirs = [their_data.detach(), their_watch.detach(), their_stdout, their_stderr]
        return cls(data, watch, {"stdout": stdout, "stderr": stderr}, max_output_bytes), theirs

    def __init__(
        self, data: socket.socket, watch: socket.socket, outputs: dict[str, int], max_output_bytes: int
    ) -> None:
        self._data = data
        self._watch = watch
        self._outputs = outputs
        self._max_output_bytes = max_output_bytes
        self._kept = {name: bytearray() for name in outputs}
        self._num_output_bytes = 0
        self._is_cut = False
        self._is_ready = False
        self._error = ""
        self._is_cancelled = False
        self._number = 0
        for descriptor in outputs.values():
            os.set_blocking(descriptor, False)
        for connection in (data, watch):
            connection.settimeout(_MESSAGE_LIMIT_S)

    def send(self, message: dict[str, Any], limit_s: float = _GRACE_S) -> None:
        """Send a program."""
        self._data.settimeout(limit_s)
        try:
            self._data.sendall(frames.encode(message))
        except OSError as error:
            raise CellNotMade(f"the cell does not take the program: {error}") from error
        self._data.settimeout(_MESSAGE_LIMIT_S)

    def wait_for_exit(self, timeout_s: float) -> Outcome:
        """Wait until the program has ended and all its processes are gone."""
        ending = self._wait(timeout_s + _GRACE_S, wants_piece=False)
        if ending is None:
            raise CellLost(f"the cell gave no report within {timeout_s + _GRACE_S:g} s")
        return self._outcome(ending)

    def wait_until_ready(self) -> None:
        """Wait until a session can run code."""
        message = self._receive(self._data)
        if message is None or not self._is_ready:
            raise CellNotMade(self._error or "the cell ended before the session began")

    def run_piece(self, code: str, timeout_s: float) -> tuple[Outcome, bool]:
        """Run a piece of code in a session. Return its outcome, and whether the session lives on."""
        began = time.monotonic()
        self._number += 1
        self._wish(GO)
        self.send({"code": code, "number": self._number}, timeout_s)
        ending = self._wait(timeout_s, wants_piece=True)
        if ending is None:
            self._wish(INTERRUPT)
            ending = self._wait(_INTERRUPT_GRACE_S, wants_piece=True)
            detail = f"more than {timeout_s:g} s"
            if ending is None:
                self.end()
                self._wait(_GRACE_S, wants_piece=False)
                return self._outcome(_Ending("timed_out", None, detail), time.monotonic() - began), False
            if self._is_alive:
                ending = _Ending("timed_out", None, detail)
        if self._is_alive:
            self._wish(STOP)
        return self._outcome(ending, time.monotonic() - began), self._is_alive

    def end(self) -> None:
        """Have the cell ended; its report comes then."""
        with contextlib.suppress(OSError):
            self._watch.shutdown(socket.SHUT_WR)

    def cancel(self) -> None:
        """From another thread: have the cell ended at once."""
        self._is_cancelled = True
        self.end()

    def close(self) -> None:
        """End everything in the cell."""
        self._data.close()
        self._watch.close()
        for descriptor in self._outputs.values():
            os.close(descriptor)
        self._outputs = {}

    _is_alive = True

    def _wish(self, wish: bytes) -> None:
        with contextlib.suppress(OSError):  # a cell that has ended says so when it is waited for
            self._watch.sendall(wish)

    def _wait(self, limit_s: float, wants_piece: bool) -> _Ending | None:
        """Collect output until a piece of code or the whole cell has ended; None if the time limit comes first."""
        deadline = time.monotonic() + limit_s
        names = {descriptor: name for name, descriptor in self._outputs.items()}
        poll = select.poll()
        for descriptor in (*names, self._data.fileno(), self._watch.fileno()):
            poll.register(descriptor, select.POLLIN)
        is_flood = False
        while (left_s := deadline - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(1000 * left_s)]
            for descriptor in ready:
                if descriptor in names and not self._read_output(names[descriptor]):
                    poll.unregister(descriptor)
            if self._is_flood and not is_flood:
                is_flood = True
                self.end()
            if self._data.fileno() in ready:
                message = self._receive(self._data)
                if message is None:
                    poll.unregister(self._data.fileno())
                elif wants_piece and message.get("number") == self._number:
                    self._read_rest()
                    return _Ending(None, _integer(message.get("exit_code")))
            if self._watch.fileno() in ready:
                return self._take_report()
        return None

    def _receive(self, connection: socket.socket) -> dict[str, Any] | None:
        """Read one message; None at the end of the connection."""
        reader = frames.FrameReader(_MAX_MESSAGE_BYTES)
        try:
            while True:
                piece = connection.recv(reader.wants)
                if not piece:
                    return None
                if (message := reader.feed(piece)) is not None:
                    break
        except (OSError, frames.BrokenFrame):
            return None
        self._is_ready |= bool(message.get("ready"))
        self._error = self._error or str(message.get("error", ""))
        return message

    def _take_report(self) -> _Ending:
        report = self._receive(self._watch)
        self._is_alive = False
        self._read_rest()
        while not self._is_ready and not self._error and self._receive(self._data) is not None:
            pass
        if self._is_cancelled:
            return _Ending("killed", None, "cancelled")
        if not self._is_ready:
            raise CellNotMade(self._error or "the cell ended before the program began")
        if report is None:
            raise CellLost("the cell ended without a report")
        if self._is_flood:
            kib = _FLOOD_FACTOR * self._max_output_bytes >> 10
            return _Ending("too_much_output", None, f"more than {kib} KiB of output")
        return _Ending(report["status"] or None, report["exit_code"], report["detail"], report["seconds"])

    @property
    def _is_flood(self) -> bool:
        return self._num_output_bytes > _FLOOD_FACTOR * self._max_output_bytes

    def _read_output(self, name: str) -> bool:
        """Read what is there; false at the end."""
        try:
            piece = os.read(self._outputs[name], 1 << 16)
        except BlockingIOError:
            return True
        self._num_output_bytes += len(piece)
        kept = self._kept[name]
        room = self._max_output_bytes - len(kept)
        self._is_cut |= len(piece) > room
        kept += piece[:room]
        return bool(piece)

    def _read_rest(self) -> None:
        """Read what is still in the pipes: no process that counts writes to them any more."""
        for name in self._outputs:
            before = -1
            while before != self._num_output_bytes and not self._is_flood:
                before = self._num_output_bytes
                self._read_output(name)

    def _outcome(self, ending: _Ending, seconds: float | None = None) -> Outcome:
        status, detail = _status(ending, bytes(self._kept["stderr"][-2000:]))
        texts = {name: kept.decode("utf-8", "replace") for name, kept in self._kept.items()}
        outcome = Outcome(
            status, texts["stdout"], texts["stderr"], ending.exit_code, seconds or ending.seconds, detail, self._is_cut
        )
        for kept in self._kept.values():
            kept.clear()
        self._num_output_bytes = 0
        self._is_cut = False
        return outcome


def _status(ending: _Ending, stderr: bytes) -> tuple[Status, str]:
    exit_code = ending.exit_code
    if ending.status is not None:
        return ending.status, ending.detail
    if exit_code == 0:
        return "ok", ""
    if exit_code is not None and exit_code < 0:
        return "killed", f"ended by {signal_name(-exit_code)}"
    if _OUT_OF_MEMORY.search(stderr):
        return "out_of_memory", "the program could not get the memory that it asked for"
    return "failed", ""


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 1
