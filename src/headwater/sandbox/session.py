"""Runs of code that share variables and files, as in a notebook."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox.cell_link import CellLost
from headwater.sandbox.outcome import Limits, Outcome
from headwater.sandbox.pool import CellPool, OpenCell, Ticket
from headwater.sandbox.request import Request

_GRACE_S = 10.0
"""The zygote ends a run that the owner has not ended this much after its time limit."""


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
            try:
                return await self._pool.in_thread(lambda ticket: self._run(code, ticket))
            except asyncio.CancelledError:
                self._lose()
                raise

    def _run(self, code: str, ticket: Ticket) -> Outcome:
        with self._pool.turn():
            try:
                if self._cell is None:
                    slow = replace(self._bounds, timeout_s=self._bounds.timeout_s + _GRACE_S)
                    self._cell = self._pool.with_cell("session", slow, Request(), _wait_until_ready)
                ticket.hold(self._cell)
                outcome, lives = self._cell.link.run_piece(code, self._bounds.timeout_s)
            except CellLost as error:
                outcome, lives = Outcome("killed", "", "", None, 0.0, detail=str(error)), False
            finally:
                ticket.release()
        if not lives:
            self._lose()
        return replace(outcome, lost_state=not lives)

    def _lose(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            cell.close()

    def close(self) -> None:
        """End the interpreter and everything that it has started."""
        self._is_closed = True
        self._lose()


def _wait_until_ready(cell: OpenCell) -> OpenCell:
    cell.link.wait_until_ready()
    return cell
