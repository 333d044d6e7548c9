"""A warm interpreter inside the sandbox. For every program, it forks a cell: a process in namespaces of its own.

The owner sends one end of a socket pair for every cell and then talks to the cell directly, so this process never sees
a program. It ends, and all cells with it, when the owner closes the connection or ends in any other way.
"""

from __future__ import annotations

import array
import gc
import importlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from headwater.sandbox.inside import frames, linux
from headwater.sandbox.inside.cell import Cell
from headwater.sandbox.inside.place import NAMESPACES, Place, prepare_folder, prepare_nested

_PRELOADED = (
    "ast", "bisect", "collections", "copy", "ctypes", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
    "linecache", "math", "operator", "pickle", "random", "re", "statistics", "string", "threading", "time", "traceback", "typing",
)  # fmt: skip
"""Modules that programs often import."""


@dataclass(frozen=True)
class Settings:
    """What the owner says at the start."""

    control: int
    """The descriptor of the connection to the owner."""
    owner: int
    """A descriptor that becomes readable when the owner ends; -1 where the system has none."""
    mode: str
    """`nested`: every cell in namespaces of its own. `single`: this process becomes the only cell, because it already
    is in such namespaces. `plain`: a forked process without any isolation."""
    paths: tuple[str, ...]
    """Folders with installed packages, in addition to the standard library."""
    preload: tuple[str, ...]
    """Modules to import now, so that programs need not."""
    user_id: int
    """Unprivileged user and group to become; -1 to stay as it is."""


def main(settings: Settings) -> None:
    """Get ready, then fork a cell for every message of the owner."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o077)
    if settings.user_id >= 0:
        _become(settings.user_id)
    _load(settings)
    control = socket.socket(fileno=settings.control)
    frames.write(control.fileno(), {"ready": True, "pid": os.getpid()})
    while (cell_end := _receive(control, settings.owner)) is not None:
        if settings.mode == "single":
            Cell(cell_end, _prepare_single, is_alone=True).serve()
        _fork_cell(cell_end, settings.mode)
        os.close(cell_end)


def _become(user_id: int) -> None:
    """Give up root. Cells map this user, so that the kernel's limits, from which root is exempt, apply to programs."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", "/proc", "proc", flags)  # cells may mount their own only if nothing of this one is covered
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)
    linux.set_dumpable(True)  # else the files in /proc/self belong to root, and cells cannot map their user


def _load(settings: Settings) -> None:
    if linux.is_supported() and settings.mode != "plain":
        linux.forbid_new_privileges()
    import site

    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path.extend(settings.paths)
    for name in (*_PRELOADED, *settings.preload):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # cells that have ended are not waited for


def _receive(control: socket.socket, owner: int) -> int | None:
    """Wait for the connection of the next cell; None when the owner is gone."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    if owner >= 0:
        poll.register(owner, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    if owner in ready:
        return None
    descriptors = array.array("i")
    _, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data)
    return descriptors[0] if descriptors else None


def _fork_cell(control: int, mode: str) -> None:
    user_id, group_id = os.geteuid(), os.getegid()
    try:
        child = linux.fork_into(NAMESPACES) if mode == "nested" else os.fork()
    except OSError as error:
        frames.write(control, {"error": f"new namespaces: {error}"})
        return
    if child:
        return

    def prepare(request: dict[str, Any]) -> Place:
        if mode == "nested":
            return prepare_nested(user_id, group_id, request["scratch_bytes"])
        os.setsid()
        if linux.is_supported():
            linux.adopt_orphans()
        return prepare_folder(request["scratch"])

    Cell(control, prepare, is_alone=mode == "nested").serve()


def _prepare_single(request: dict[str, Any]) -> Place:
    return prepare_folder("/tmp")
