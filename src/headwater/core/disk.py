"""A disk that is full: which one it is, what was being written, how much that needs and how much is free."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path

from headwater.core.errors import DiskFull

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the file system or the limit of this process (ulimit -f) allows",
}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def disk_full(
    error: BaseException, path: Path, what: str, *, needed_bytes: int = 0, remedy: str = "free some space"
) -> DiskFull | None:
    """The error to raise instead of ``error`` if that means that there is no more space; None for other errors."""
    cause = _cause(error)
    if cause is None:
        return None
    disk = mount_of(path)
    usage = shutil.disk_usage(disk)
    needed = f"; about {show_bytes(needed_bytes)} are needed" if needed_bytes else ""
    return DiskFull(
        f"{path}: {what} cannot be written: {cause}. The disk at {disk} has {show_bytes(usage.free)} free of "
        f"{show_bytes(usage.total)}{needed}; {remedy}, then resume",
        cause,
        needed_bytes,
    )


def _cause(error: BaseException) -> str | None:
    if isinstance(error, DiskFull):
        return error.cause
    if isinstance(error, OSError) and error.errno in _CAUSES:
        return _CAUSES[error.errno]
    # Libraries written in Rust or C++ (safetensors, tokenizers, pyarrow) keep only the text of the system's error.
    text = str(error)
    return next(
        (cause for number, cause in _CAUSES.items() if f"os error {number})" in text or os.strerror(number) in text),
        None,
    )


def mount_of(path: Path) -> Path:
    """Where the file system that holds ``path``, or would hold it, is mounted."""
    place = path.absolute()
    while not place.exists() or not os.path.ismount(place):
        if place == place.parent:
            break
        place = place.parent
    return place


def show_bytes(count: float) -> str:
    """For example ``512 bytes``, ``1.5 MiB``, ``20 GiB``."""
    power = min(4, int(math.log2(max(1, count)) // 10))
    shown = count / 1024**power
    return f"{shown:.0f} {_UNITS[power]}" if shown >= 10 or not power else f"{shown:.1f} {_UNITS[power]}"


def cache_dir() -> Path:
    """The cache folder: ``$HEADWATER_CACHE``, else ``$XDG_CACHE_HOME/headwater``, else ``~/.cache/headwater``."""
    own = os.environ.get("HEADWATER_CACHE", "")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "headwater"
