"""The end of a file that has one JSON object per line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 16


def last_records(path: Path, count: int) -> list[dict[str, Any]]:
    """The last ``count`` lines that are whole, oldest first; none where there is no file.

    Only the end of the file is read. A line that is cut off is passed over: a process may have been killed in it, or is
    writing it now.
    """
    if count < 1 or not path.exists():
        return []
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        read = b""
        while start > 0 and read.count(b"\n") <= count:
            length = min(_BLOCK_BYTES, start)
            start = file.seek(start - length)
            read = file.read(length) + read
    lines = read.splitlines()
    if start > 0:
        lines = lines[1:]  # it began before what was read
    return [record for record in map(_parse, lines) if record is not None][-count:]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
