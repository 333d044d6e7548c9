"""Whether a process that a test knows by its id still runs."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """A process that has ended is known until its parent has read its exit status, and does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while the file is read
        return False
