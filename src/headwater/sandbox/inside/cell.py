"""The first process of a cell: receives a program from the owner, gives up all privileges, and becomes the program."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from headwater.sandbox.inside import frames, linux
from headwater.sandbox.inside.confine import Bounds, confine
from headwater.sandbox.inside.examined import serve_calls
from headwater.sandbox.inside.examiner import run_tests
from headwater.sandbox.inside.place import Place
from headwater.sandbox.inside.runner import run_program, run_session


@dataclass(frozen=True)
class CellLinks:
    """Descriptors that the owner sends for a cell."""

    data: int
    """The program comes from here. A session keeps it; other programs never see it."""
    watch: int
    """The zygote's connection to the owner."""
    stdout: int
    stderr: int


class Cell:
    """Runs what the owner sends, in a place that is ready for it."""

    def __init__(self, links: CellLinks, bounds: Bounds, own_virtual_bytes: int) -> None:
        self._links = links
        self._bounds = bounds
        self._own_virtual_bytes = own_virtual_bytes

    def run(self, kind: str, place: Place) -> NoReturn:
        """Receive a program, say that all is ready, and run it. This process ends with it."""
        request = frames.read(self._links.data)
        if request is None:
            os._exit(1)
        place.write_all(request["files"])
        if kind != "session":
            place.write("main.py", request["code"].encode("utf-8", "surrogatepass"))
        frames.write(self._links.data, {"ready": True})
        if kind == "tests":
            self._run_tests(place)
        elif kind == "session":
            # The zygote limits the processor time of each run; the kernel can only limit that of all runs together.
            self._bounds = replace(self._bounds, cpu_s=math.inf)
            self._confine(_nowhere(), keep=(self._links.data,))
            run_session(self._links.data, "<session>")
        else:
            self._confine(_open_input(place, request["stdin"]))
            run_program(place.program)
        os._exit(1)

    def _run_tests(self, place: Place) -> None:
        """Fork the program, then become the process of the tests that judge it.

        The program is forked before the tests are read from the owner, so they are not in its memory. The process of
        the tests is secret: the program cannot read, trace or write to it. It can only answer calls, or end it, and
        then the tests have failed.
        """
        calls_from, calls_to = os.pipe()
        answers_from, answers_to = os.pipe()
        if linux.is_supported():
            linux.set_dumpable(False)  # before there is another process: what it has opened once, it can read for ever
        if os.fork() == 0:
            try:
                self._confine(_nowhere(), stdout=_nowhere(), keep=(calls_from, answers_to))
                serve_calls(place.program, calls_from, answers_to)
            finally:
                os._exit(1)
        message: dict[str, Any] | None = frames.read(self._links.data)
        if message is None:
            os._exit(1)
        os.chdir("/")
        self._confine(_nowhere(), keep=(calls_to, answers_from), is_secret=True)
        run_tests(message["tests"], calls_to, answers_from)

    def _confine(
        self, stdin: int, stdout: int | None = None, keep: tuple[int, ...] = (), is_secret: bool = False
    ) -> None:
        stdout = self._links.stdout if stdout is None else stdout
        for place, descriptor in enumerate((stdin, stdout, self._links.stderr)):
            os.dup2(descriptor, place)
        confine(self._bounds, keep, self._own_virtual_bytes, is_secret)


def reset_signals() -> None:
    """Forget what the zygote does about signals."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if linux.is_supported():
        linux.die_with_parent(signal.SIGKILL)


def _nowhere() -> int:
    return os.open("/dev/null", os.O_RDWR)


def _open_input(place: Place, text: str) -> int:
    """Standard input is a file without a name."""
    if not text:
        return _nowhere()
    path = place.write(".stdin", text.encode("utf-8", "surrogatepass"))
    descriptor = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return descriptor
