"""``status.json``, read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core.errors import RunError
from headwater.core.waits import OpenWait
from headwater.observe.recent_log import LogLine
from headwater.observe.stage_progress import StageProgress

COUNTS = ("dispatched", "trained", "dropped", "buffered", "in_flight")


@dataclass(frozen=True)
class RunningGroup:
    id: int
    uid: str
    seconds: float
    doing: str


@dataclass(frozen=True)
class RunStatus:
    """What a run said of itself at ``time``."""

    pid: int
    host: str
    process_start: str | None
    started: float
    time: float
    state: str
    error: str
    waits: tuple[OpenWait, ...]
    log: tuple[LogLine, ...]
    read_error: str = ""
    """Why the rest could not be read at ``time``; it is then older."""
    step: int | None = None
    total_steps: int | None = None
    version: int | None = None
    counts: Mapping[str, int] | None = None
    oldest_groups: tuple[RunningGroup, ...] = ()
    capacity: int | None = None
    drop_reasons: Mapping[str, int] | None = None
    engine_restarts: int = 0
    stage: StageProgress | None = None


def read_status(path: Path) -> RunStatus | None:
    """None where there is no such file: the run is older than it, or has not begun."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _parse(content: dict[str, Any]) -> RunStatus:
    return RunStatus(
        pid=int(content["pid"]),
        host=str(content["host"]),
        process_start=content["process_start"],
        started=float(content["started"]),
        time=float(content["time"]),
        state=str(content["state"]),
        error=str(content["error"]),
        waits=tuple(_wait(**each) for each in content["waits"]),
        log=tuple(LogLine(**each) for each in content["log"]),
        read_error=str(content.get("read_error", "")),
        step=content.get("step"),
        total_steps=content.get("total_steps"),
        version=content.get("version"),
        counts=read_counts(content["ledger"]) if content.get("ledger") else None,
        oldest_groups=tuple(RunningGroup(**each) for each in content.get("oldest", ())),
        capacity=content.get("capacity"),
        drop_reasons=content.get("drop_reasons"),
        engine_restarts=int(content.get("engine_restarts", 0)),
        stage=StageProgress(**content["stage"]) if content.get("stage") else None,
    )


def _wait(hard_limit_s: float | None, **rest: Any) -> OpenWait:
    # JSON has no infinity.
    return OpenWait(hard_limit_s=math.inf if hard_limit_s is None else hard_limit_s, **rest)


def read_counts(content: Mapping[str, Any]) -> dict[str, int]:
    """The five counts of the ledger; more may stand beside them."""
    return {name: int(content[name]) for name in COUNTS}
