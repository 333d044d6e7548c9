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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.cell_link import CellLost, CellNotMade
from headwater.sandbox.launch import Kind
from headwater.sandbox.outcome import Limits, Outcome
from headwater.sandbox.pool import CellPool, OpenCell, Ticket
from headwater.sandbox.request import Request
from headwater.sandbox.session import CodeSession


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
