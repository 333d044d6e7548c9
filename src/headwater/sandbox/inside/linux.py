"""The few system calls of Linux that Python does not offer."""

from __future__ import annotations

import ctypes
import os
import sys

NEW_MOUNTS = 0x00020000
NEW_CGROUP = 0x02000000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000
ALL_NAMESPACES = NEW_MOUNTS | NEW_CGROUP | NEW_HOSTNAME | NEW_IPC | NEW_USERS | NEW_PIDS | NEW_NETWORK

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_GET_TID_ADDRESS = 40
_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00200000, 0x01000000
_CAPABILITY_VERSION = 0x20080522
_SIGCHLD = 17

MACHINE = os.uname().machine
_SYSCALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}

_IS_SUPPORTED = sys.platform == "linux" and MACHINE in _SYSCALLS

# PyDLL keeps the interpreter's lock during a call, so that a child of clone() has it too.
_libc = ctypes.PyDLL(None, use_errno=True)


def is_supported() -> bool:
    """True on Linux on a processor whose system calls are known here."""
    return _IS_SUPPORTED


def _check(answer: int, what: str) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return answer


def _syscall(name: str, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(_SYSCALLS[MACHINE][name]), *arguments), name)


def fork_into(namespaces: int) -> int:
    """Fork into new namespaces. Return 0 in the child, as ``os.fork`` does."""
    zero = ctypes.c_long(0)
    # The C library keeps the thread's number at this place; the kernel updates it in the child, as for fork().
    place = ctypes.c_long(0)
    knows_place = _libc.prctl(ctypes.c_int(_PR_GET_TID_ADDRESS), ctypes.byref(place), zero, zero, zero) == 0
    flags = ctypes.c_long(namespaces | _SIGCHLD | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if knows_place else 0))
    last = (place, zero) if MACHINE == "x86_64" else (zero, place)
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        child = _syscall("clone", flags, zero, zero, *last)
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if child == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return child


def unshare(namespaces: int) -> None:
    _check(_libc.unshare(ctypes.c_int(namespaces)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    answer = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(answer, f"mount {kind or source} on {target}")


def set_mount_flags(target: str, flags: int) -> None:
    """Set MS_RDONLY, MS_NOSUID or MS_NODEV for a mount and all mounts below it."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    recursively = ctypes.c_uint(_AT_RECURSIVE)
    here = ctypes.c_int(_AT_FDCWD)
    _syscall("mount_setattr", here, target.encode(), recursively, ctypes.byref(attributes), size)


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    _syscall("pivot_root", new_root.encode(), old_root.encode())


def drop_capabilities() -> None:
    """Give up every capability of this process for good."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _syscall("capset", ctypes.byref(header), ctypes.byref(nothing))


def forbid_new_privileges() -> None:
    """Programs that this process executes gain nothing from setuid bits or file capabilities."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_dumpable(is_dumpable: bool) -> None:
    """Whether processes of the same user may trace this process and read its memory and files in /proc."""
    _prctl(_PR_SET_DUMPABLE, int(is_dumpable))


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def map_own_user(inside_id: int, user_id: int, group_id: int) -> None:
    """In a new user namespace: map the one user and group that this process has outside."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inside_id} {user_id} 1")
    _write("/proc/self/gid_map", f"{inside_id} {group_id} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
