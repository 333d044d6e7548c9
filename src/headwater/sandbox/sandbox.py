"""Runs code of a model, isolated from this machine.

    sandbox = Sandbox(SandboxConfig())
    outcome = sandbox.run("print(6 * 7)")          # blocks
    outcome = await sandbox.arun("print(6 * 7)")   # does not block the event loop
    async with sandbox.session() as session:       # keeps variables between runs
        await session.run("x = 6")
        outcome = await session.run("x * 7")
    sandbox.close()

Every program runs in a *cell*: separate namespaces (processes, mounts, network, users, IPC, host name), with a
scratch folder in memory that vanishes with it. A cell is a fork of a warm interpreter, so it costs milliseconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.cell_link import CellLost, CellNotMade
from headwater.sandbox.launch import Kind
from headwater.sandbox.pool import CellPool, OpenCell, Ticket
from headwater.sandbox.records import Limits, Outcome, Request

_GRACE_S = 10.0
"""The zygote ends a run that the owner has not ended this much after its time limit."""


@dataclass(frozen=True)
class Program:
    """One program for ``run_many``."""

    code: str
    stdin: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Contents of files by their path below the working folder."""
    limits: Limits | None = None


class Sandbox:
    """Runs programs and sessions, at most ``max_concurrent`` at the same time. Safe to use from several threads.

    The isolation is chosen and tested when the first program runs, or with ``start``. ``SandboxUnavailable`` says what
    is missing if none works.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config if config is not None else SandboxConfig()
        self._pool = CellPool(self.config)

    @property
    def max_concurrent(self) -> int:
        """Programs and sessions at the same time: the setting, or the number of cores that this process may use."""
        return self._pool.max_concurrent

    def start(self) -> Kind:
        """Choose the isolation and start now, so that the first program does not wait. Return what was chosen."""
        return self._pool.start()

    def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a Python program and return how it ended. Files are written below its working folder first."""
        return self._run(Program(code, stdin, files or {}, limits), Ticket())

    async def arun(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """As ``run``, without blocking the event loop. Cancelling it ends the program."""
        program = Program(code, stdin, files or {}, limits)
        return await self._pool.in_thread(lambda ticket: self._run(program, ticket))

    def run_many(self, programs: Sequence[Program]) -> list[Outcome]:
        """Run programs side by side and return their outcomes in the same order."""
        return list(self._pool.threads().map(lambda each: self._run(each, Ticket()), programs))

    def run_tests(
        self, code: str, tests: str, files: Mapping[str, str | bytes] | None = None, limits: Limits | None = None
    ) -> Outcome:
        """Run tests against a program that may try to cheat. The status is `ok` only if the tests came to their end.

            outcome = sandbox.run_tests("def add(a, b): return a + b", "assert add(2, 2) == 4")

        The program and the tests run in two processes. Names that the tests use but do not define are functions of the
        program; calling one sends the arguments to the program's process and returns the value that it sends back.
        ``solution.name`` is the same, ``solution.value("name")`` a global value. This is why the result holds:

        - Only plain values come back, so no ``__eq__`` of the program is ever called. Other objects are handles, which
          are equal only to themselves. Built-in functions are never taken from the program.
        - The result is the exit status of the tests' process, which the supervising process of the cell collects. A
          program that exits, kills the tests or breaks the connection makes them fail.
        - The tests' process cannot be traced or read by the program, and the program was forked before the tests
          arrived, so it cannot look expected values up. The tests import nothing from the program's folder.

        Standard output is that of the tests; what the program prints is discarded. Standard error is of both.
        """
        return self._run(Program(code, files=files or {}, limits=limits), Ticket(), tests)

    def session(self, limits: Limits | None = None) -> CodeSession:
        """A session, whose runs share variables and files. Use it with ``async with``."""
        return CodeSession(self._pool, self.config, limits)

    def close(self) -> None:
        """End everything that runs here."""
        self._pool.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, program: Program, ticket: Ticket, tests: str | None = None) -> Outcome:
        bounds = (program.limits or Limits()).bounds(self.config)
        request = Request(program.code, program.stdin, program.files)

        def work(cell: OpenCell) -> Outcome:
            try:
                ticket.hold(cell)
                if tests is not None:
                    cell.link.send({"tests": tests})
                return cell.link.wait_for_exit(bounds.timeout_s)
            except CellNotMade:
                raise
            except CellLost as error:
                return Outcome("killed", "", "", None, 0.0, detail=str(error))
            finally:
                ticket.release()
                cell.close()

        with self._pool.turn():
            return self._pool.with_cell("run" if tests is None else "tests", bounds, request, work)


class CodeSession:
    """One interpreter that lives from the first run to the end of the ``async with`` block.

    The value of a last expression is printed, as in a notebook. Between two runs all processes of the session are
    stopped, so it uses no processor time. Code that exceeds a time limit is interrupted, and the variables stay if it
    ends within a second; otherwise, and for any other limit, the interpreter is lost, ``Outcome.lost_state`` is true
    and the next run starts a new one.
    """

    def __init__(self, pool: CellPool, config: SandboxConfig, limits: Limits | None) -> None:
        self._pool = pool
        self._bounds = (limits or Limits()).bounds(config)
        self._cell: OpenCell | None = None
        self._current: object = None
        """The last run, unless it was cancelled: its thread may still be starting a cell then."""
        self._lock = threading.Lock()
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False

    async def __aenter__(self) -> CodeSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    async def run(self, code: str) -> Outcome:
        """Run code after everything that ran before. Cancelling it ends the interpreter."""
        async with self._one_at_a_time:
            if self._is_closed:
                raise RuntimeError("this session was closed")
            run = self._current = object()
            try:
                return await self._pool.in_thread(lambda ticket: self._run(code, ticket, run))
            except BaseException:
                self._lose(run)
                raise

    def _run(self, code: str, ticket: Ticket, run: object) -> Outcome:
        with self._pool.turn():
            try:
                if (cell := self._cell) is None:
                    slow = replace(self._bounds, timeout_s=self._bounds.timeout_s + _GRACE_S)
                    cell = self._pool.with_cell("session", slow, Request(), _wait_until_ready)
                    self._keep(cell, run)
                ticket.hold(cell)
                outcome, lives = cell.link.run_piece(code, self._bounds.timeout_s)
            except CellLost as error:
                outcome, lives = Outcome("killed", "", "", None, 0.0, detail=str(error)), False
            finally:
                ticket.release()
        if not lives:
            self._lose(run)
        return replace(outcome, lost_state=not lives)

    def _keep(self, cell: OpenCell, run: object) -> None:
        """Use a new cell for this run and for those after it, unless the run was cancelled while the cell started."""
        with self._lock:
            if is_wanted := run is self._current:
                self._cell = cell
        if not is_wanted:
            cell.close()
            raise CellLost("cancelled")

    def _lose(self, run: object) -> None:
        """End the interpreter, unless a later run has a new one already."""
        with self._lock:
            if run is not self._current:
                return
            cell, self._cell, self._current = self._cell, None, None
        if cell is not None:
            cell.close()

    def close(self) -> None:
        """End the interpreter and everything that it has started."""
        self._is_closed = True
        self._lose(self._current)


def _wait_until_ready(cell: OpenCell) -> OpenCell:
    cell.link.wait_until_ready()
    return cell
