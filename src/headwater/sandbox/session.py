"""Runs of code that share variables and files, as in a notebook."""

from __future__ import annotations

import asyncio
from typing import Any

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.outcome import Limits, Outcome
from headwater.sandbox.pool import CellPool, OpenCell, Ticket
from headwater.sandbox.zygote_process import CellLost


class Session:
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
        self._one_at_a_time = asyncio.Lock()
        self._is_closed = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    async def run(self, code: str) -> Outcome:
        """Run code after everything that ran before. Cancelling it ends the interpreter."""
        async with self._one_at_a_time:
            if self._is_closed:
                raise RuntimeError("this session was closed")
            try:
                return await self._pool.in_thread(lambda ticket: self._run(code, ticket))
            except asyncio.CancelledError:
                self._lose()
                raise

    def _run(self, code: str, ticket: Ticket) -> Outcome:
        with self._pool.turn():
            try:
                if self._cell is None:
                    first = {"kind": "session", "code": "", "stdin": ""}
                    self._cell = self._pool.open(first, self._bounds, {})
                ticket.hold(self._cell)
                self._cell.send({"code": code}, self._bounds)
                report = self._cell.receive(self._bounds)
            except CellLost as error:
                self._lose()
                return Outcome("killed", "", "", None, 0.0, detail=str(error), lost_state=True)
        lives = report.pop("lives")
        if not lives:
            self._lose()
        return make_outcome(report, lost_state=not lives)

    def _lose(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            cell.close()

    def close(self) -> None:
        """End the interpreter and everything that it has started."""
        self._is_closed = True
        self._lose()


def make_outcome(report: dict[str, Any], lost_state: bool = False) -> Outcome:
    return Outcome(
        status=report["status"],
        stdout=report["stdout"],
        stderr=report["stderr"],
        exit_code=report["exit_code"],
        seconds=report["seconds"],
        detail=report["detail"],
        is_cut=report["is_cut"],
        lost_state=lost_state,
    )
