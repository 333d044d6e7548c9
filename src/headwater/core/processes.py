"""Identifies a process, also when its id is reused later, names the signal that ended one, and raises the limit of open
files."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
from pathlib import Path

_ENDED = {"Z", "X", "x"}
_MOST_DESCRIPTORS = 65536


def signal_name(number: int) -> str:
    """For example ``SIGKILL``. Most real-time signals have no name: ``signal 35``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def process_start(pid: int) -> str | None:
    """A string that identifies the start of process ``pid``, different for every process; None if it does not exist.

    A process that has ended counts as gone, even if its parent has not collected its exit status.
    """
    if not Path("/proc/self/stat").exists():
        return _start_by_ps(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program name in brackets, which may contain anything; the third is the state.
    fields = stat.rpartition(")")[2].split()
    state, ticks_since_boot = fields[0], fields[19]
    return None if state in _ENDED else f"{boot_id()}+{ticks_since_boot}"


def boot_id() -> str:
    """Identifies the current boot of the machine, from which ticks are counted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return f"boot of {socket.gethostname()}"


def _start_by_ps(pid: int) -> str | None:
    """For systems without /proc, such as macOS."""
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, began = answer.stdout.strip().partition(" ")
    return None if not began or state[0] in _ENDED else began.strip()


def allow_many_descriptors() -> int:
    """Raise the limit as far as the system allows, and return it. The usual 1,024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
