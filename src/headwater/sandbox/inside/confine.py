"""What a process gives up before it executes foreign code."""

from __future__ import annotations

import math
import os
import resource
import sys
from dataclasses import dataclass

from headwater.sandbox.inside import linux, seccomp

_MAX_OPEN_FILES = 256
_STACK_BYTES = 8 << 20


@dataclass(frozen=True)
class Bounds:
    """The limits of one run, in the units of the kernel."""

    memory_bytes: int
    cpu_s: float
    timeout_s: float
    max_processes: int
    max_file_bytes: int
    max_output_bytes: int


def confine(bounds: Bounds, keep: tuple[int, ...], own_virtual_bytes: int, is_secret: bool) -> None:
    """Close inherited descriptors but 0, 1, 2 and ``keep``, set limits, and give up all privileges.

    Other processes of the same user cannot read or trace a process that is secret.
    """
    os.setsid()
    _close_all_but(keep)
    _limit(bounds, own_virtual_bytes)
    if not linux.is_supported():
        return
    linux.drop_capabilities()
    linux.set_dumpable(not is_secret)
    linux.forbid_new_privileges()
    seccomp.install()


def _close_all_but(keep: tuple[int, ...]) -> None:
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, max(1 << 16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] if sys.platform != "linux" else 0))


def _limit(bounds: Bounds, own_virtual_bytes: int) -> None:
    limits = {
        "RLIMIT_AS": bounds.memory_bytes + own_virtual_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": bounds.max_file_bytes,
        "RLIMIT_NOFILE": _MAX_OPEN_FILES,
        "RLIMIT_NPROC": bounds.max_processes,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    if bounds.cpu_s != math.inf:
        limits["RLIMIT_CPU"] = math.ceil(bounds.cpu_s) + 1
    for name, value in limits.items():
        which = getattr(resource, name, None)
        if which is not None:  # not every system has all of them
            _, hard = resource.getrlimit(which)
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (most, most))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
