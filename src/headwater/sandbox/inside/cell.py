"""The first process of a cell: receives a program from the owner, runs it, and reports how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from headwater.sandbox.inside import frames, linux
from headwater.sandbox.inside.confine import Bounds, confine
from headwater.sandbox.inside.meter import Meter, virtual_bytes
from headwater.sandbox.inside.place import Place
from headwater.sandbox.inside.runner import run_program, run_session
from headwater.sandbox.inside.supervisor import Ending, Output, OwnerLeft, Supervisor


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
        if request["kind"] == "session":
            self._run_session(place)
        else:
            self._run_program(place, request)

    def _run_program(self, place: Place, request: dict[str, Any]) -> None:
        path = place.write("main.py", request["code"].encode("utf-8", "surrogatepass"))
        stdin = _open_input(place, request["stdin"])
        began = time.monotonic()
        child = self._fork(stdin, (), lambda: run_program(path))
        supervisor = self._supervise(child)
        ending = supervisor.wait_for_exit()
        self._report(ending, time.monotonic() - began)

    def _run_session(self, place: Place) -> None:
        code_from, code_to = os.pipe()
        done_from, done_to = os.pipe()
        stdin = _open_input(place, "")
        child = self._fork(stdin, (code_from, done_to), lambda: run_session(code_from, done_to, "<session>"))
        supervisor = self._supervise(child)
        os.close(code_from)
        os.close(done_to)
        lives = True
        while lives and (message := frames.read(self._control)) is not None:
            self._bounds = Bounds(**message["bounds"])
            supervisor.thaw()
            began = time.monotonic()
            try:
                frames.write(code_to, {"code": message["code"]})
            except BrokenPipeError:
                pass  # the program has ended, which the supervisor finds out
            ending, lives = supervisor.wait_for_piece(done_from)
            supervisor.freeze()
            self._report(ending, time.monotonic() - began, lives=lives)

    def _fork(self, stdin: int, keep: tuple[int, ...], run: Callable[[], None]) -> int:
        bounds = self._bounds
        virtual = virtual_bytes(os.getpid())
        child = os.fork()
        if child:
            os.close(stdin)
            return child
        try:
            for place, descriptor in enumerate((stdin, *self._output.writers)):
                os.dup2(descriptor, place)
            confine(bounds, keep, virtual)
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
