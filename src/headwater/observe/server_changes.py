"""``servers.jsonl``: how the servers of a run were changed while it ran (``headwater servers``).

The first line of each part of a run has the servers that its recipe names, because a resumed run starts with these
again. The lines after it are the changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Change = Literal["add", "drain", "undrain", "remove"]
_KINDS = ("start", *get_args(Change))


@dataclass(frozen=True)
class ServerChange:
    """One line of the file."""

    kind: Literal["start", "add", "drain", "undrain", "remove"]
    time: float
    """Seconds since the epoch."""
    version: int
    """The policy version that was published last."""
    servers: tuple[str, ...]
    """The server that was changed, or all with which the run has started."""

    @classmethod
    def now(cls, kind: Literal["start"] | Change, version: int, servers: Sequence[str]) -> ServerChange:
        return cls(kind, time.time(), version, tuple(servers))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_changes(path: Path) -> list[ServerChange]:
    """All valid lines, oldest first; none if there is no file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    changes = (_parse(line) for line in lines if line.strip())
    return [each for each in changes if each is not None]


def _parse(line: str) -> ServerChange | None:
    try:
        told = json.loads(line)
        if told["kind"] not in _KINDS:
            return None
        return ServerChange(told["kind"], float(told["time"]), int(told["version"]), tuple(map(str, told["servers"])))
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Difference:
    """How the servers of a run differ from those with which it has started."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @classmethod
    def of(cls, changes: Sequence[ServerChange]) -> Difference:
        """After the changes of the last part of a run."""
        at_start: tuple[str, ...] = ()
        now: dict[str, None] = {}
        for change in changes:
            if change.kind == "start":
                at_start, now = change.servers, dict.fromkeys(change.servers)
            elif change.kind == "add":
                now |= dict.fromkeys(change.servers)
            elif change.kind == "remove":
                now = {name: None for name in now if name not in change.servers}
        return cls(
            tuple(name for name in now if name not in at_start), tuple(name for name in at_start if name not in now)
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)

    def __str__(self) -> str:
        both = {"added": self.added, "removed": self.removed}
        return " and ".join(f"{', '.join(names)} {what}" for what, names in both.items() if names)
