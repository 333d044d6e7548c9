"""The first process of a cell: receives a program from the owner, runs it, and reports how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from headwater.sandbox.inside import frames, linux
from headwater.sandbox.inside.confine import Bounds, confine
from headwater.sandbox.inside.examined import serve_calls
from headwater.sandbox.inside.examiner import run_tests
from headwater.sandbox.inside.meter import Meter, virtual_bytes
from headwater.sandbox.inside.place import Place
from headwater.sandbox.inside.runner import run_program, run_session
from headwater.sandbox.inside.supervisor import Ending, Output, OwnerLeft, Supervisor, kill_all


class Cell:
    """One program or session. ``prepare`` makes the place for it, from the owner's first message."""

    def __init__(self, control: int, prepare: Callable[[dict[str, Any]], Place], is_alone: bool) -> None:
        self._control = control
        self._prepare = prepare
        self._is_alone = is_alone

    def serve(self) -> NoReturn:
        """Run what the owner sends, then end this process and with it the whole cell."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            request = frames.read(self._control)
            if request is not None:
                self._serve(request)
        except (OwnerLeft, BrokenPipeError, ConnectionResetError):
            pass
        finally:
            if not self._is_alone:
                kill_all(Meter(self._is_alone))
            os._exit(0)

    def _serve(self, request: dict[str, Any]) -> None:
        try:
            place = self._prepare(request)
            if linux.is_supported():
                linux.drop_capabilities()
                linux.set_dumpable(False)  # the program must not read or trace this process
            self._bounds = Bounds(**request["bounds"])
            place.write_all(request["files"])
            self._meter = Meter(self._is_alone)
            self._output = Output(self._bounds.max_output_bytes)
        except OSError as error:
            frames.write(self._control, {"error": f"{type(error).__name__}: {error}"})
            return
        {"run": self._run_program, "tests": self._run_tests, "session": self._run_session}[request["kind"]](
            place, request
        )

    def _run_program(self, place: Place, request: dict[str, Any]) -> None:
        path = place.write("main.py", request["code"].encode("utf-8", "surrogatepass"))
        stdin = _open_input(place, request["stdin"])
        began = time.monotonic()
        child = self._fork(stdin, (), lambda: run_program(path))
        ending = self._supervise(child).wait_for_exit()
        self._report(ending, time.monotonic() - began)

    def _run_tests(self, place: Place, request: dict[str, Any]) -> None:
        """Run a program and the tests that judge it in two processes.

        The program is forked before the tests are read from the owner, so they are not in its memory. The process of
        the tests is secret: the program cannot read, trace or write to it. It can only answer calls, or end it, and
        then the tests have failed.
        """
        path = place.write("main.py", request["code"].encode("utf-8", "surrogatepass"))
        calls_from, calls_to = os.pipe()
        answers_from, answers_to = os.pipe()
        nowhere = os.open("/dev/null", os.O_RDWR)
        began = time.monotonic()
        self._fork(nowhere, (calls_from, answers_to), lambda: serve_calls(path, calls_from, answers_to), stdout=nowhere)
        os.close(calls_from)
        os.close(answers_to)
        message = frames.read(self._control)
        if message is None:
            raise OwnerLeft
        tests = message["tests"]
        keep = (calls_to, answers_from)
        child = self._fork(nowhere, keep, lambda: run_tests(tests, calls_to, answers_from), is_secret=True)
        os.close(calls_to)
        os.close(answers_from)
        ending = self._supervise(child).wait_for_exit()
        self._report(ending, time.monotonic() - began)

    def _run_session(self, place: Place, request: dict[str, Any]) -> None:
        code_from, code_to = os.pipe()
        done_from, done_to = os.pipe()
        stdin = _open_input(place, "")
        child = self._fork(stdin, (code_from, done_to), lambda: run_session(code_from, done_to, "<session>"))
        supervisor = self._supervise(child)
        os.close(code_from)
        os.close(done_to)
        lives = True
        while lives and (message := frames.read(self._control)) is not None:
            supervisor.thaw()
            began = time.monotonic()
            with contextlib.suppress(BrokenPipeError):  # the program has ended, which the supervisor finds out
                frames.write(code_to, {"code": message["code"]})
            ending, lives = supervisor.wait_for_piece(done_from)
            supervisor.freeze()
            self._report(ending, time.monotonic() - began, lives=lives)

    def _fork(
        self,
        stdin: int,
        keep: tuple[int, ...],
        run: Callable[[], None],
        stdout: int | None = None,
        is_secret: bool = False,
    ) -> int:
        """Fork a process that gives up everything but ``keep`` and then runs foreign code."""
        virtual = virtual_bytes(os.getpid())
        child = os.fork()
        if child:
            return child
        try:
            out, err = self._output.writers
            for place, descriptor in enumerate((stdin, out if stdout is None else stdout, err)):
                os.dup2(descriptor, place)
            confine(self._bounds, keep, virtual, is_secret)
            run()
        finally:
            os._exit(1)

    def _supervise(self, child: int) -> Supervisor:
        return Supervisor(child, self._bounds, self._output, self._meter, self._control)

    def _report(self, ending: Ending, seconds: float, **more: Any) -> None:
        is_cut = self._output.is_cut
        report = asdict(ending) | self._output.take() | {"seconds": seconds, "is_cut": is_cut} | more
        frames.write(self._control, report)


def _open_input(place: Place, text: str) -> int:
    """Standard input is a file without a name."""
    path = place.write(".stdin", text.encode("utf-8", "surrogatepass"))
    descriptor = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return descriptor
