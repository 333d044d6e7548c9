"""Finds the descendants of a process, also those that have left its process group, and kills them.

Programs that run where Headwater is not installed load this file by its path, so it needs only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal

_MOST_ROUNDS = 100


def family(root: int) -> list[int]:
    """A process and all its descendants. Without /proc, only the process is known."""
    found = [root]
    waiting = [root]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            found += [int(each) for each in contents(f"/proc/{process}/task/{task}/children").split()]
    return found


def kill_family(leader: int) -> None:
    """Kill a process that leads a group, with the group and all descendants.

    They are stopped first: a stopped process cannot start another, and does not end, so that its children stay its own.
    """
    stopped: list[int] = []
    for _ in range(_MOST_ROUNDS):
        found = [each for each in family(leader) if each not in stopped]
        if not found:
            break
        for process in found:
            _send(process, signal.SIGSTOP)
        stopped += found
    for process in stopped:
        _send(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def contents(path: str) -> bytes:
    """The first 64 KiB of a file of the system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)
