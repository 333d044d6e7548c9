"""Telling one process from another that later got its number."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ENDED = {"Z", "X", "x"}


def process_start(pid: int) -> str | None:
    """When process ``pid`` began, in words that only compare equal for the same process; None where there is none.

    A process that has ended and whose parent has not looked yet counts as gone.
    """
    if not Path("/proc/self/stat").exists():
        return _start_by_ps(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name of the program, in brackets, and may hold anything; the third is the state.
    fields = stat.rpartition(")")[2].split()
    state, ticks_since_boot = fields[0], fields[19]
    return None if state in _ENDED else f"{_boot()}+{ticks_since_boot}"


def _boot() -> str:
    """Names this boot of the machine: ticks are counted from it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return "boot"


def _start_by_ps(pid: int) -> str | None:
    """Where there is no /proc, as on macOS."""
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, began = answer.stdout.strip().partition(" ")
    return None if not began or state[0] in _ENDED else began.strip()
