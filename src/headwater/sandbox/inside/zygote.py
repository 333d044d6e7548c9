"""A warm interpreter inside the sandbox. For every program, it forks a cell: a process in separate namespaces.

The owner sends four descriptors for every cell. Two belong to the program's output and one brings the program, so this
process never has a program or its output in its memory, which every later cell begins with a copy of. Through the
fourth, this process reports how the cell ended. It ends, and all cells with it, when the owner closes the connection
or ends in any other way.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from headwater.sandbox.inside import frames, linux, runner, seccomp
from headwater.sandbox.inside.cell import (
    NAMESPACES,
    Cell,
    CellLinks,
    CellPlace,
    prepare_folder,
    prepare_nested,
    reset_signals,
)
from headwater.sandbox.inside.confine import Bounds
from headwater.sandbox.inside.family import children
from headwater.sandbox.inside.watched import Meter, WatchedCell

_PRELOADED = (
    "ast", "bisect", "collections", "copy", "ctypes", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "json", "linecache", "math", "operator", "pickle", "random", "re", "statistics", "string",
    "threading", "time", "traceback", "typing",
)  # fmt: skip
"""Modules that programs often import."""
_MAX_REQUEST_BYTES = 4096
_NUM_LINKS = 4
READY = b"ready"


@dataclass(frozen=True)
class Settings:
    """What the owner says at the start."""

    control: int
    """The descriptor of the connection to the owner."""
    owner: int
    """A descriptor that becomes readable when the owner ends; -1 where the system has none."""
    mode: str
    """`nested`: every cell in separate namespaces. `single`: only one cell, because this process already is in
    namespaces for it. `plain`: forked processes without any isolation."""
    paths: tuple[str, ...]
    """Folders with installed packages, in addition to the standard library."""
    preload: tuple[str, ...]
    """Modules to import now, so that programs need not."""
    user_id: int
    """Unprivileged user and group to become; -1 to stay as it is."""


def main(arguments: list[str]) -> None:
    """Get ready, then make and watch cells until the owner leaves. The argument is the settings as JSON."""
    settings = Settings(**json.loads(arguments[0]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o077)
    if settings.user_id >= 0:
        _become(settings.user_id)
    if linux.is_supported():
        linux.adopt_orphans()
        if settings.mode != "nested":
            linux.set_dumpable(False)  # programs must not read or trace this process
        if settings.mode != "plain":
            linux.forbid_new_privileges()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _load(settings)
    Zygote(settings).serve()
    os._exit(0)


def _become(user_id: int) -> None:
    """Give up root. Cells map this user, so that the kernel's limits, from which root is exempt, apply to programs."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", "/proc", "proc", flags)  # cells may mount their own only if nothing of this one is covered
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)
    linux.set_dumpable(True)  # else the files in /proc/self belong to root, and cells cannot map their user


def _load(settings: Settings) -> None:
    import site

    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path.extend(settings.paths)
    for name in (*_PRELOADED, *settings.preload):
        importlib.import_module(name)
    runner.warm_up()
    if linux.is_supported():
        seccomp.make_filter(linux.MACHINE)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages


class Zygote:
    """Forks cells and watches them."""

    def __init__(self, settings: Settings) -> None:
        self._mode = settings.mode
        self._owner = settings.owner
        self._control = socket.socket(fileno=settings.control)
        self._meter = Meter()
        self._cells: dict[int, WatchedCell] = {}
        """By process id."""
        self._user = os.geteuid(), os.getegid()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        if self._owner >= 0:
            self._selector.register(self._owner, selectors.EVENT_READ)
        self._control.send(READY)
        while True:
            for key, _ in self._selector.select(self._until_look_s()):
                if key.fd == self._owner or (key.fd == self._control.fileno() and not self._make_cell()):
                    return
                cell = key.data
                if cell is not None and key.fd == cell.link and not cell.obey():
                    self._selector.unregister(cell.link)
            self._collect()
            for cell in list(self._cells.values()):
                cell.look()

    def _until_look_s(self) -> float | None:
        times = [each for each in (cell.until_look_s() for cell in self._cells.values()) if each is not None]
        return min(times, default=None)

    def _make_cell(self) -> bool:
        """Receive the owner's request for a cell and fork it; false if the owner has left."""
        descriptors = array.array("i")
        try:
            message, ancillary, _, _ = self._control.recvmsg(
                _MAX_REQUEST_BYTES, socket.CMSG_SPACE(_NUM_LINKS * descriptors.itemsize)
            )
        except OSError:
            return False
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data)
        if len(descriptors) != _NUM_LINKS:
            return False
        links = CellLinks(*descriptors)
        request = json.loads(message)
        bounds = Bounds(**request["bounds"])
        try:
            child = linux.fork_into(NAMESPACES) if self._mode == "nested" else os.fork()
        except OSError as error:
            frames.write(links.data, {"error": f"new namespaces: {error}"})
            for descriptor in descriptors:
                os.close(descriptor)
            return True
        if child == 0:
            self._become_cell(links, bounds, request)
        for descriptor in (links.data, links.stdout, links.stderr):
            os.close(descriptor)
        self._watch(WatchedCell(child, bounds, self._meter, links.watch, is_running=request["kind"] != "session"))
        return True

    def _become_cell(self, links: CellLinks, bounds: Bounds, request: dict[str, Any]) -> NoReturn:
        try:
            reset_signals()
            place = self._prepare(request)
            Cell(links, bounds, self._meter.own_virtual_bytes).run(request["kind"], place)
        except OSError as error:
            with contextlib.suppress(OSError):
                frames.write(links.data, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(1)

    def _prepare(self, request: dict[str, Any]) -> CellPlace:
        if self._mode == "nested":
            return prepare_nested(*self._user, request["scratch_bytes"])
        return prepare_folder(request["scratch"] or "/tmp")

    def _watch(self, cell: WatchedCell) -> None:
        self._cells[cell.process] = cell
        self._selector.register(cell.link, selectors.EVENT_READ, cell)
        if cell.handle >= 0:
            self._selector.register(cell.handle, selectors.EVENT_READ, cell)

    def _collect(self) -> None:
        """Report the cells that have ended. Where cells share a process namespace, end what they have left behind."""
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    break
                cell = self._cells.pop(process, None)
                if cell is None:
                    continue
                self._end_orphans()
                with contextlib.suppress(KeyError):  # the owner may have left
                    self._selector.unregister(cell.link)
                if cell.handle >= 0:
                    self._selector.unregister(cell.handle)
                cell.report(os.waitstatus_to_exitcode(status))

    def _end_orphans(self) -> None:
        """Kill the processes that were left to this one when the process above them ended."""
        if self._mode == "nested":
            return
        while orphans := [each for each in children(os.getpid()) if each not in self._cells]:
            for process in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process, 0)
