"""Cells for programs and sessions, a limited number of which work at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headwater.config.rollout_schema import SandboxConfig
from headwater.core.processes import allow_many_descriptors
from headwater.core.waits import named_wait, wait_until
from headwater.sandbox.cell_link import CellLink, CellNotMade
from headwater.sandbox.inside.confine import Bounds
from headwater.sandbox.isolation import choose
from headwater.sandbox.launch import Kind
from headwater.sandbox.records import Request, SandboxUnavailable
from headwater.sandbox.zygote_process import ZygoteLost, ZygoteProcess

T = TypeVar("T")
_ATTEMPTS = 3
_PAUSE_S = 0.1
_QUEUE_LIMIT_S = 3600.0
"""How long a program may wait for its turn."""


class Ticket:
    """Lets another thread end the work of this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cell: OpenCell | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._cell is not None:
                self._cell.link.cancel()

    def hold(self, cell: OpenCell) -> None:
        with self._lock:
            self._cell = cell
            if self._is_cancelled:
                cell.link.cancel()

    def release(self) -> None:
        with self._lock:
            self._cell = None


class OpenCell:
    """A cell with a program or session in it."""

    def __init__(self, link: CellLink, zygote: ZygoteProcess | None, scratch: str | None) -> None:
        self.link = link
        self._zygote = zygote
        """A zygote that serves only this cell."""
        self._scratch = scratch

    def close(self) -> None:
        """End everything in the cell."""
        self.link.close()
        if self._zygote is not None:
            self._zygote.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


class CellPool:
    """Makes cells. The isolation is chosen and tested when the first one is needed."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self.max_concurrent = config.max_concurrent or _num_cores()
        self._zygote: ZygoteProcess | None = None
        self._has_single = False
        """Whether every program gets its own zygote. Then they are not tested again."""
        self._zygote_lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._turns = threading.Condition()
        self._num_running = 0
        self._num_waiting = 0
        self._is_closed = False

    def start(self) -> Kind:
        """Make sure that a zygote runs, and return what isolates it."""
        return self._ready_zygote().kind

    def with_cell(self, kind: str, bounds: Bounds, request: Request, work: Callable[[OpenCell], T]) -> T:
        """Make a cell, send it the program and do ``work`` with it.

        If the cell cannot be made, for example because the zygote has died, this is done again; no code has run.
        """
        reason = ""
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * _PAUSE_S)
            try:
                cell = self._open(kind, bounds, request)
            except (ZygoteLost, CellNotMade) as error:
                reason = str(error)
                continue
            try:
                return work(cell)
            except CellNotMade as error:
                reason = str(error)
                cell.close()
        raise SandboxUnavailable(f"the sandbox no longer works on this machine: {reason}")

    def _open(self, kind: str, bounds: Bounds, request: Request) -> OpenCell:
        zygote = self._ready_zygote()
        is_single = zygote.kind == "bubblewrap-single"
        if is_single:
            with self._zygote_lock:
                self._zygote = None
        scratch = tempfile.mkdtemp(prefix="headwater-sandbox-") if zygote.kind == "unprotected" else None
        scratch_bytes = bounds.max_file_bytes + request.num_bytes + (1 << 20)
        cell = OpenCell(zygote.make_cell(kind, bounds, scratch_bytes, scratch), zygote if is_single else None, scratch)
        try:
            cell.link.send(request.message())
        except CellNotMade:
            cell.close()
            raise
        return cell

    def _ready_zygote(self) -> ZygoteProcess:
        with self._zygote_lock:
            if self._is_closed:
                raise SandboxUnavailable("this sandbox was closed")
            if self._zygote is None or not self._zygote.is_alive:
                if self._zygote is not None:
                    self._zygote.close()
                allow_many_descriptors()  # every open session needs four
                self._zygote = self._new_zygote()
                self._has_single = self._zygote.kind == "bubblewrap-single"
            return self._zygote

    def _new_zygote(self) -> ZygoteProcess:
        if self._has_single:
            with contextlib.suppress(ZygoteLost):
                return ZygoteProcess("bubblewrap-single", self._config)
        return choose(self._config)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until fewer than ``max_concurrent`` programs run."""
        with self._turns:
            self._num_waiting += 1
            try:
                wait_until(
                    self._turns,
                    lambda: self._num_running < self.max_concurrent,
                    lambda: f"a program waits for its turn in the sandbox; {self._num_running} run",
                    kind="sandbox",
                    hard_limit_s=_QUEUE_LIMIT_S,
                )
            finally:
                self._num_waiting -= 1
            self._num_running += 1
        try:
            yield
        finally:
            with self._turns:
                self._num_running -= 1
                self._turns.notify()

    async def in_thread(self, work: Callable[[Ticket], T]) -> T:
        """Do blocking work in a thread of this pool. Cancelling it ends the cell that the work holds."""
        ticket = Ticket()
        future = asyncio.wrap_future(self.threads().submit(work, ticket))
        try:
            return await named_wait(
                future, lambda: "a program runs in the sandbox or waits for its turn", kind="sandbox",
                hard_limit_s=2 * _QUEUE_LIMIT_S,
            )  # fmt: skip
        except BaseException:
            ticket.cancel()
            raise

    def threads(self) -> ThreadPoolExecutor:
        with self._zygote_lock:
            if self._is_closed:
                raise SandboxUnavailable("this sandbox was closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="sandbox")
            return self._threads

    def close(self) -> None:
        with self._zygote_lock:
            self._is_closed = True
            zygote, self._zygote = self._zygote, None
            threads, self._threads = self._threads, None
        if zygote is not None:
            zygote.close()
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
