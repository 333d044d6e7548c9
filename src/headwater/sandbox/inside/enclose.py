"""Isolation without bubblewrap: enter new namespaces and build a file system that shows only what is listed."""

from __future__ import annotations

import json
import os
import signal
import stat
from dataclasses import dataclass

from headwater.sandbox.inside import linux

_ROOT = "/tmp"
"""Any folder that is there on every system: the new file system is built over it, in a private mount namespace."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INSIDE_ROOT_ID = 0


@dataclass(frozen=True)
class View:
    """What of the file system is visible."""

    binds: tuple[tuple[str, str], ...]
    """Paths outside and where they appear, read-only."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links: target and path."""
    folders: tuple[str, ...]
    """Empty folders, and those above the paths."""


def main(arguments: list[str]) -> None:
    """Execute a command in new namespaces. The arguments are the view as JSON, `privileged` or not, and the command."""
    view, privileges, *command = arguments
    enter(View(**json.loads(view)), has_privileges=privileges == "privileged")
    os.execv(command[0], command)


def enter(view: View, has_privileges: bool) -> None:
    """Continue as process 1 of new namespaces, in a new file system. The original process waits and then exits.

    Root with all capabilities needs no user namespace. Others are root in a new one while the file system is built.
    """
    user_id, group_id = os.geteuid(), os.getegid()
    namespaces = linux.ALL_NAMESPACES & ~(linux.NEW_USERS if has_privileges else 0)
    linux.unshare(namespaces)
    if not has_privileges:
        linux.map_own_user(_INSIDE_ROOT_ID, user_id, group_id)
    child = os.fork()
    if child:
        _wait_and_exit(child)
    linux.die_with_parent(signal.SIGKILL)
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    _build(view)
    os.chdir(_ROOT)
    linux.pivot_root(".", ".")
    linux.unmount(".")
    os.chdir("/")
    linux.mount("", "/", "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)


def _wait_and_exit(child: int) -> None:
    for descriptor in range(3, 64):  # the owner must see when the child has closed its end
        try:
            os.close(descriptor)
        except OSError:
            continue
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _build(view: View) -> None:
    # Sources may lie below _ROOT, which the new file system covers.
    sources = {source: os.open(source, os.O_PATH) for source, _ in view.binds}
    linux.mount("tmpfs", _ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=0755")
    for path in view.folders:
        os.makedirs(_ROOT + path, exist_ok=True)
    for source, path in view.binds:
        _bind(f"/proc/self/fd/{sources[source]}", _ROOT + path)
        os.close(sources[source])
    for target, path in view.links:
        os.symlink(target, _ROOT + path)
    os.makedirs(_ROOT + "/dev/shm", exist_ok=True)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{_ROOT}/dev/{name}", is_device=True)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{_ROOT}/dev/{name}")
    os.makedirs(_ROOT + "/proc", exist_ok=True)
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", _ROOT + "/proc", "proc", flags)


def _bind(source: str, target: str, is_device: bool = False) -> None:
    """Make a path visible with everything mounted below it, read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, stat.S_IRUSR))
    linux.mount(source, target, "", linux.MS_BIND | linux.MS_REC)
    linux.set_mount_flags(target, linux.MS_NOSUID | (0 if is_device else linux.MS_RDONLY | linux.MS_NODEV))
